from __future__ import annotations

import pytest

from remat.passes.choices import cannot_be_recomputed, constrain
from remat.solvers.errors import InvalidOption
from remat.solvers.problem import Op, Problem, Value


def two_layers() -> Problem:
    """Layers 0 and 1 of an up projection, an activation, a down projection, and a head."""
    values, ops = [Value("x", 8, owned=True)], []
    source = 0
    for layer in ("layers.0", "layers.1"):
        for name in ("mlp.up", "mlp.act", "mlp.down", ""):
            path = f"{layer}.{name}".rstrip(".")
            values.append(Value(f"{path}.out", 8))
            ops.append(Op(path, "forward", (source,), (len(values) - 1,), 1.0, layer=path))
            source = len(values) - 1
    values.append(Value("loss", 1, output="forward"))
    ops.append(Op("head", "forward", (source,), (len(values) - 1,), 1.0, layer="head"))
    values.append(Value("tangent", 1, tangent=True))
    gradient = len(values) - 1
    for v in range(8, -1, -1):
        output = "backward" if v == 0 else None
        values.append(Value(f"g{v}", 8, output=output))
        ops.append(Op(f"b{v}", "backward", (gradient, v), (len(values) - 1,), 1.0, layer="head"))
        gradient = len(values) - 1
    return Problem(tuple(values), tuple(ops))


def dropped(problem: Problem) -> list[str]:
    return [problem.values[v].name for v in problem.dropped]


def test_recompute_drops_what_is_made_and_read_inside() -> None:
    found = constrain(two_layers(), recompute=("layers.*.mlp",))
    assert dropped(found) == [
        "layers.0.mlp.up.out",
        "layers.0.mlp.act.out",
        "layers.1.mlp.up.out",
        "layers.1.mlp.act.out",
    ]
    assert not any(found.values[v].offloadable for v in found.dropped)


def test_a_module_means_all_below_it_and_its_output_may_be_kept() -> None:
    found = constrain(two_layers(), recompute=("layers.0",))
    assert dropped(found) == [f"layers.0.mlp.{part}.out" for part in ("up", "act", "down")]
    both = constrain(two_layers(), recompute=("layers",))
    assert "layers.0.out" in dropped(both)
    assert "layers.1.out" not in dropped(both)


def test_a_star_is_one_part_of_a_path() -> None:
    with pytest.raises(InvalidOption, match="matches no module"):
        constrain(two_layers(), recompute=("*.mlp",))
    assert dropped(constrain(two_layers(), recompute=("*.[1-9].mlp",))) == [
        "layers.1.mlp.up.out",
        "layers.1.mlp.act.out",
    ]


def test_kept_modules_have_no_op_that_runs_again() -> None:
    found = constrain(two_layers(), keep=("head", "layers.*.mlp.down"))
    assert [op.name for op in found.ops if op.phase == "forward" and not op.rerunnable] == [
        "layers.0.mlp.down",
        "layers.1.mlp.down",
        "head",
    ]
    assert found.dropped == ()


def test_without_patterns_nothing_changes() -> None:
    assert constrain(two_layers()).key == two_layers().key


def test_a_pattern_that_means_nothing_names_the_nearest_module() -> None:
    with pytest.raises(InvalidOption, match=r"keep='layer.0' .* the nearest is 'layers.0'"):
        constrain(two_layers(), keep=("layer.0",))
    with pytest.raises(InvalidOption, match=r"there are 'layers', .* and 7 more"):
        constrain(two_layers(), recompute=("zzzz",))


def test_a_module_in_both_is_refused() -> None:
    with pytest.raises(InvalidOption, match=r"'layers.0.mlp.up' lies in both"):
        constrain(two_layers(), keep=("layers.0",), recompute=("layers.*.mlp",))


def test_what_may_never_run_again_is_told() -> None:
    problem = two_layers()
    ops = tuple(
        Op(op.name, op.phase, op.reads, op.writes, 1.0, rerunnable=False, layer=op.layer)
        if op.name == "layers.0.mlp.act"
        else op
        for op in problem.ops
    )
    problem = Problem(problem.values, ops)
    assert cannot_be_recomputed(problem, ("layers.0",)) == ("layers.0.mlp.act",)
    assert dropped(constrain(problem, recompute=("layers.0",))) == [
        "layers.0.mlp.up.out",
        "layers.0.mlp.down.out",
    ]
