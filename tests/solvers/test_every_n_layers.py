"""``every_n_layers``: which layers are found, which are checkpointed, what they keep."""

from __future__ import annotations

from dataclasses import replace

import pytest

from remat.solvers.errors import InvalidOption
from remat.solvers.every_n_layers import repeated_blocks, solve_every_n_layers
from remat.solvers.problem import Link, Op, Problem, Value
from remat.solvers.registry import Request
from remat.solvers.schedule import Decision, decisions
from remat.solvers.simulate import simulate


@pytest.mark.parametrize(
    ("layers", "blocks"),
    [
        (["L['self'].transformer.h.0.attn", "L['self'].transformer.h.1"],
         {"L['self'].transformer.h": [0, 1]}),
        (["model.layers.10.mlp", "model.layers.9.mlp", "model.norm"], {"model.layers": [9, 10]}),
        (["encoder.layer.0", "encoder.layer.1", "decoder.layer.0.x", "decoder.layer.1.y"],
         {"encoder.layer": [0, 1], "decoder.layer": [0, 1]}),
        # Nested: the outermost that repeats. A stack of one block does not.
        (["stages.0.layers.0", "stages.0.layers.1", "stages.1.layers.0"], {"stages": [0, 1]}),
        (["stages.0.layers.0.conv", "stages.0.layers.1.conv"], {"stages.0.layers": [0, 1]}),
        (["net._modules['0'].a", "net._modules['1'].a"], {"net._modules": [0, 1]}),
        (["blocks[0].a", "blocks[1].a"], {"blocks": [0, 1]}),
        (["", "head", "fc1", "layer.0"], {}),
    ],
)  # fmt: skip
def test_repeated_blocks_are_read_off_the_paths(layers, blocks):
    found = repeated_blocks(layers)
    assert found == {k: [f"{k}.{n}" for n in numbers] for k, numbers in blocks.items()}


def model(layers: int, stack: str = "model.layers") -> Problem:
    """embed -> (up -> act -> down) x layers -> loss; backward reads every input, in reverse."""
    values = [Value("e", 1)]
    ops = [Op("embed", "forward", (), (0,), layer="model.embed")]
    backward: list[Op] = []
    for k in range(layers):
        before = len(values) - 1
        up, act, down = before + 1, before + 2, before + 3
        values += [Value(f"{name}{k}", 1) for name in ("up", "act", "down")]
        path = f"{stack}.{k}.mlp"
        for name, read, write in (("up", before, up), ("act", up, act), ("down", act, down)):
            ops.append(Op(f"{name}{k}", "forward", (read,), (write,), layer=path))
            backward.insert(0, Op(f"b {name}{k}", "backward", (read,), ()))
    ops.append(Op("loss", "forward", (len(values) - 1,), (), layer="model.loss"))
    backward.insert(0, Op("b loss", "backward", (len(values) - 1,), ()))
    return Problem(tuple(values), (*ops, *backward))


def recomputed(problem: Problem, every: int) -> set[str]:
    """Names of the values that are recomputed."""
    proposal = solve_every_n_layers(Request(problem, None, every_n_layers=every))
    chosen = decisions(problem, proposal.schedule)
    return {problem.values[v].name for v, what in chosen.items() if what is Decision.RECOMPUTE}


@pytest.mark.parametrize(
    ("every", "checkpointed"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3]), (9, [0])]
)
def test_every_nth_layer_keeps_only_what_enters_it(every, checkpointed):
    assert recomputed(model(5), every) == {f"{v}{k}" for k in checkpointed for v in ("up", "act")}


def test_a_layer_is_recomputed_as_a_whole_when_its_backward_begins():
    problem = model(2)
    schedule = solve_every_n_layers(Request(problem, None)).schedule
    names = [problem.ops[index].name for index in schedule.computes]
    backward = names[names.index("b loss") :]
    assert backward == [
        "b loss",
        *("up1", "act1", "b down1", "b act1", "b up1"),
        *("up0", "act0", "b down0", "b act0", "b up0"),
    ]


def test_what_may_not_run_again_is_kept():
    problem = model(2)
    ops = tuple(
        Op(op.name, op.phase, op.reads, op.writes, layer=op.layer, rerunnable=op.name != "up1")
        for op in problem.ops
    )
    assert recomputed(Problem(problem.values, ops), 1) == {"up0", "act0", "act1"}


def test_the_budget_is_not_looked_at():
    problem = model(3)
    assert solve_every_n_layers(Request(problem, 0)) == solve_every_n_layers(Request(problem, None))


def test_a_model_without_layers_is_told_so():
    problem = Problem((Value("x", 1),), (Op("f", "forward", (), (0,), layer="model.fc"),))
    with pytest.raises(InvalidOption, match="none of the 1 forward ops lies in a numbered module"):
        solve_every_n_layers(Request(problem, None))


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "2"])
def test_n_is_a_positive_int(every):
    with pytest.raises(InvalidOption, match=f"every_n_layers is {every!r}; it must be an int >= 1"):
        solve_every_n_layers(Request(model(2), None, every_n_layers=every))


def offloaded(problem: Problem, link: Link, every: int = 1) -> set[str]:
    """Names of the values that leave; the judge accepts the plan."""
    proposal = solve_every_n_layers(Request(problem, None, every_n_layers=every, link=link))
    simulate(problem, proposal.schedule, link)
    chosen = decisions(problem, proposal.schedule)
    return {problem.values[v].name for v, what in chosen.items() if what is Decision.OFFLOAD}


def test_with_a_link_the_borders_of_checkpointed_layers_leave():
    timed = tuple(replace(op, seconds=1.0) for op in model(4).ops)
    problem = Problem(model(4).values, timed)
    fast = Link(10.0, 10.0)
    borders = {
        "e",
        "down0",
        "down1",
        "down2",
    }  # down3 is read again at once, by the loss's backward
    assert offloaded(problem, fast) == borders
    assert offloaded(problem, fast, every=4) == {"e", "down0"}  # of layer 0 alone
    alone = solve_every_n_layers(Request(problem, None)).schedule
    linked = solve_every_n_layers(Request(problem, None, link=fast)).schedule
    assert linked.computes == alone.computes
    assert simulate(problem, linked, fast).peak < simulate(problem, alone).peak
    assert simulate(problem, linked, fast).seconds == simulate(problem, alone).seconds


def test_a_border_that_a_link_cannot_carry_stays():
    timed = tuple(replace(op, seconds=1.0) for op in model(4).ops)
    problem = Problem(model(4).values, timed)
    assert offloaded(problem, Link(1e-3, 1e-3)) == set()
    assert offloaded(problem, Link(0.2, 0.2)) < {"e", "down0", "down1", "down2"}
