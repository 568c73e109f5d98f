"""The judge, against timelines worked out by hand; each of its refusals."""

from __future__ import annotations

import pytest
from brute import least_peak
from hypothesis import given
from strategies import chain, problems

from remat.solvers.bounds import floor
from remat.solvers.errors import InvalidOption, InvalidSchedule
from remat.solvers.problem import Link, Op, Problem, Value
from remat.solvers.schedule import Schedule, Step
from remat.solvers.segments import NEVER, replay
from remat.solvers.simulate import simulate

# x1 (2 bytes) and x2 (3), then g2 (3), g1 (2), g0 (1); x3 and g3 are a loss and weigh nothing.
THREE = chain([1, 2, 3, 4], [1.0, 2.0, 4.0])
NAMES = {op.name: index for index, op in enumerate(THREE.ops)} | {
    value.name: index for index, value in enumerate(THREE.values)
}
KINDS = {"+": "offload", "-": "free", "<": "reload", "?": "wait"}


def steps(text: str, names: dict[str, int] = NAMES) -> Schedule:
    """``"f1 -x1 +x2 <x3 ?x4"``: run f1, free x1, offload x2, reload x3, wait for x4."""
    return Schedule(
        tuple(
            Step(KINDS[word[0]], names[word[1:]])  # type: ignore[arg-type]
            if word[0] in KINDS
            else Step("compute", names[word])
            for word in text.split()
        )
    )


def test_save_all_by_hand():
    timeline = simulate(THREE, steps("f1 f2 f3 b3 -x2 -g3 b2 -x1 -g2 b1 -g1"))
    assert timeline.bytes == (2, 5, 5, 8, 5, 5, 7, 5, 2, 3, 1)
    assert (timeline.peak, timeline.peak_step) == (8, 3)
    assert {THREE.values[v].name for v in timeline.alive_at_peak} == {"x1", "x2", "x3", "g3", "g2"}
    assert (timeline.forward_peak, timeline.backward_peak) == (5, 8)
    assert (timeline.forward_seconds, timeline.seconds) == (7.0, 21.0)


def test_recomputation_by_hand():
    timeline = simulate(THREE, steps("f1 f2 -x1 f3 b3 -x2 -g3 f1 b2 -x1 -g2 b1 -g1"))
    assert timeline.bytes == (2, 5, 3, 3, 6, 3, 3, 5, 7, 5, 2, 3, 1)
    assert timeline.seconds == 22.0
    assert timeline.forward_seconds == 7.0


def test_fixed_bytes_workspace_and_flops_are_counted():
    op = Op("f", "forward", (), (0,), seconds=1.0, flops=7, workspace=10)
    problem = Problem((Value("x", 3, output="forward"),), (op,), fixed_bytes=100)
    timeline = simulate(problem, Schedule((Step("compute", 0),)))
    assert timeline.bytes == (113,)
    assert (timeline.flops, timeline.forward_flops) == (7, 7)


def test_the_empty_schedule_peaks_at_the_fixed_bytes():
    timeline = simulate(Problem((), (), fixed_bytes=5), Schedule(()))
    assert (timeline.peak, timeline.peak_step, timeline.bytes) == (5, -1, ())


def test_a_second_instance_counts_while_its_op_runs():
    # f makes x (2) and the output y (5). Running it again for x makes a second y for a moment.
    values = (Value("x", 2), Value("y", 5, output="forward"))
    ops = (Op("f", "forward", (), (0, 1)), Op("b", "backward", (0,), ()))
    problem = Problem(values, ops)
    names = {"f": 0, "b": 1, "x": 0, "y": 1}
    timeline = simulate(problem, steps("f -x f b -x", names))
    assert timeline.bytes == (7, 5, 12, 7, 5)
    assert timeline.peak == 12


def test_tangents_are_there_from_the_first_step_of_backward():
    values = (Value("x", 1), Value("g", 10, tangent=True), Value("unread", 100, tangent=True))
    ops = (Op("f", "forward", (), (0,)), Op("b", "backward", (0, 1), ()))
    names = {"f": 0, "b": 1, "x": 0, "g": 1}
    timeline = simulate(Problem(values, ops), steps("f -x f b -x -g", names))
    assert timeline.bytes == (1, 0, 111, 111, 110, 100)
    assert (timeline.forward_peak, timeline.backward_peak) == (1, 111)


def test_a_deferred_op_may_run_in_either_part():
    values = (Value("x", 1), Value("d", 2), Value("g", 4, tangent=True))
    ops = (
        Op("f", "forward", (), (0,)),
        Op("d", "deferred", (0,), (1,), seconds=1.0),
        Op("h", "forward", (), ()),
        Op("b", "backward", (1, 2), ()),
    )
    problem = Problem(values, ops)
    names = {"f": 0, "d": 1, "h": 2, "b": 3}
    early, late = (
        simulate(problem, steps("f d h b", names)),
        simulate(problem, steps("f h d b", names)),
    )
    assert (early.forward_seconds, late.forward_seconds) == (1.0, 0.0)
    assert early.bytes == (1, 3, 3, 7)
    assert late.bytes == (1, 1, 7, 7)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("f2", "step 0: forward op 'f2' runs out of program order"),
        ("f1 f1 f2 f3", "step 1: op 'f1' is recomputed before forward has ended"),
        ("f1 b3", "step 1: backward op 'b3' runs before forward has ended"),
        ("f1 f2 f3 b2", "step 3: backward op 'b2' runs out of program order"),
        ("f1 f2 f3 b3 b3", "step 4: backward op 'b3' runs twice"),
        ("f1 f2 f3 -x2 b3", "step 4: op 'b3' reads 'x2', which is not there"),
        ("f1 f2 f3 -x3", "step 3: frees 'x3', but it is an output"),
        ("f1 -x0", "step 1: frees 'x0', but the caller owns it"),
        ("f1 -x2", "step 1: frees 'x2', which is not there"),
        ("f1 -g3", "step 1: frees 'g3', which is not there"),
        ("f1 f2 +x1", "step 2: transfers a value, but there is no link"),
        ("f1 f2 ?x1", "step 2: waits for 'x1', which is not in flight"),
        ("f1 f2", "step 2: forward op 'f3' never runs"),
        ("f1 f2 f3 b3 b2", "step 5: backward op 'b1' never runs"),
    ],
)
def test_what_cannot_run_is_refused(schedule, message):
    with pytest.raises(InvalidSchedule) as caught:
        simulate(THREE, steps(schedule))
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step("compute", 6), "step 0: compute of index 6; there are 6"),
        (Step("compute", -6), "step 0: compute of index -6; there are 6"),
        (Step("free", 99), "step 0: free of index 99; there are 8"),
        (Step("dance", 0), "step 0: unknown kind 'dance'"),  # type: ignore[arg-type]
    ],
)
def test_a_step_that_means_nothing_is_refused(step, message):
    with pytest.raises(InvalidSchedule, match=message):
        simulate(THREE, Schedule((step,)))


def test_an_op_that_may_not_run_again_is_refused():
    values = (Value("x", 1), Value("y", 1))
    ops = (
        Op("once", "forward", (), (0,), rerunnable=False),
        Op("late", "deferred", (), (1,), rerunnable=False),
        Op("b", "backward", (0, 1), ()),
    )
    names = {"once": 0, "late": 1, "b": 2, "x": 0, "y": 1}
    problem = Problem(values, ops)
    assert simulate(problem, steps("once late b", names)).peak == 2
    with pytest.raises(InvalidSchedule, match="op 'once' may not be run again"):
        simulate(problem, steps("once -x once late b", names))
    with pytest.raises(InvalidSchedule, match="op 'late' may not be run again"):
        simulate(problem, steps("once late -y late b", names))


def test_a_tangent_nobody_reads_stays_to_the_end():
    problem = Problem(
        (Value("x", 5), Value("t", 1, tangent=True), Value("unread", 100, tangent=True)),
        (
            Op("f", "forward", (), (0,)),
            Op("b0", "backward", (1,), ()),
            Op("b1", "backward", (0, 1), ()),
        ),
    )
    steps = [Step("compute", 0), Step("compute", 1), Step("free", 2), Step("compute", 2)]
    with pytest.raises(InvalidSchedule, match="frees 'unread', but it has no reader"):
        simulate(problem, Schedule(tuple(steps)))
    assert simulate(problem, Schedule(tuple(steps[:2] + steps[3:]))).peak == floor(problem)[0]


def test_a_lost_output_is_refused():
    ops = (Op("f", "forward", (), ()), Op("d", "deferred", (), (0,)))
    problem = Problem((Value("y", 1, output="backward"),), ops)
    with pytest.raises(InvalidSchedule, match="the output 'y' is not there at the end"):
        simulate(problem, Schedule((Step("compute", 0),)))
    assert simulate(problem, Schedule((Step("compute", 0), Step("compute", 1)))).peak == 1


# --- transfers: 2 bytes a second out, 4 back, half a second to begin with -----------------------

LINK = Link(offload_bandwidth=2.0, reload_bandwidth=4.0, latency=0.5)


def test_a_transfer_beside_computation_costs_nothing():
    # x1 leaves at 1.0 and is gone at 1.0 + 0.5 + 2/2 = 2.5, while f2 runs to 3.0.
    text = "f1 +x1 f2 ?x1 -x1 f3 b3 -x2 -g3 <x1 ?x1 b2 -x1 -g2 b1 -g1"
    timeline = simulate(THREE, steps(text), LINK)
    # It comes back from 15.0 on: 0.5 + 2/4 of waiting, in the step of the wait.
    assert timeline.seconds == 21.0 + 1.0
    assert timeline.bytes[4] == 3
    assert timeline.bytes[9:11] == (5, 5)  # its bytes are taken when the reload begins


def test_a_wait_that_comes_too_early_stalls():
    timeline = simulate(THREE, steps("f1 +x1 ?x1 f2 f3 b3 -x2 -g3 b2 -x1 -g2 b1 -g1"), LINK)
    assert timeline.seconds == 21.0 + 1.5
    assert timeline.forward_seconds == 7.0 + 1.5


def test_each_way_is_one_queue():
    # x1 takes 1.5 s from 3.0 on, x2 waits for it and takes 0.5 + 3/2 = 2.0: done at 6.5.
    timeline = simulate(THREE, steps("f1 f2 +x1 +x2 ?x2 f3 ?x1 b3 b2 b1"), LINK)
    assert timeline.seconds == 21.0 + 3.5


def test_the_ways_do_not_wait_for_each_other():
    text = "f1 +x1 f2 ?x1 -x1 f3 +x2 <x1 ?x1 b3 ?x2 b2 b1"
    timeline = simulate(THREE, steps(text), LINK)
    # At 7.0 both start: x1 is back at 8.0 and b3 runs to 16.0; x2 was out at 9.0.
    assert timeline.seconds == 22.0


def test_a_value_may_be_read_while_it_leaves():
    assert simulate(THREE, steps("f1 +x1 f2 f3 ?x1 b3 b2 b1"), LINK).seconds == 21.0


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ("f1 +x1 -x1", "step 2: frees 'x1' while it is being copied"),
        ("f1 +x1 +x1", "step 2: offloads 'x1', which is not there or in flight"),
        ("f1 +x2", "step 1: offloads 'x2', which is not there or in flight"),
        ("f1 +x0", "step 1: offloads 'x0', which may not be offloaded"),
        ("f1 f2 <x1", "step 2: reloads 'x1', which was not offloaded and freed"),
        ("f1 +x1 ?x1 <x1", "step 3: reloads 'x1', which was not offloaded and freed"),
        ("f1 +x1 f2 ?x1 -x1 f3 b3 <x1 b2", "step 8: op 'b2' reads 'x1' without a wait"),
        ("f1 +x1 f2 ?x1 -x1 f3 <x1 <x1", "step 7: reloads 'x1', which was not offloaded and freed"),
        ("f1 +x1 f2 f3 b3 b2 b1", "step 7: 'x1' is still in flight"),
    ],
)
def test_a_transfer_that_cannot_be_is_refused(schedule, message):
    with pytest.raises(InvalidSchedule) as caught:
        simulate(THREE, steps(schedule), LINK)
    assert str(caught.value) == message


def test_a_value_that_may_not_be_offloaded_stays():
    problem = Problem((Value("x", 1, offloadable=False),), (Op("f", "forward", (), (0,)),))
    with pytest.raises(InvalidSchedule, match="offloads 'x', which may not be offloaded"):
        simulate(problem, Schedule((Step("compute", 0), Step("offload", 0))), LINK)


def test_an_output_is_not_offloaded():
    problem = Problem((Value("x", 1, output="forward"),), (Op("f", "forward", (), (0,)),))
    with pytest.raises(InvalidSchedule, match="offloads 'x', which is an output"):
        simulate(problem, Schedule((Step("compute", 0), Step("offload", 0))), LINK)


def test_a_copy_may_be_brought_back_again_and_made_again():
    # x1 is back for b2 and goes; it comes back for b1, here an op that reads it, from the copy.
    text = "f1 +x1 f2 ?x1 -x1 f3 b3 -x2 -g3 <x1 ?x1 b2 -x1 -g2 <x1 ?x1 -x1 b1 -g1"
    timeline = simulate(THREE, steps(text), LINK)
    assert timeline.seconds == 21.0 + 1.0 + 1.0
    # A second copy takes the queue once more, and adds nothing: the first is still there.
    again = "f1 +x1 ?x1 +x1 f2 f3 ?x1 -x1 b3 -x2 -g3 <x1 ?x1 b2 -x1 -g2 b1 -g1"
    assert simulate(THREE, steps(again), LINK).seconds == 21.0 + 1.5 + 1.0


def test_a_reload_counts_from_its_step_even_if_the_queue_is_busy():
    text = "f1 +x1 f2 +x2 ?x1 -x1 f3 ?x2 -x2 <x2 <x1 ?x2 b3 -x2 -g3 ?x1 b2 -x1 -g2 b1 -g1"
    timeline = simulate(THREE, steps(text), LINK)
    at = [step.kind for step in steps(text).steps].index("reload")
    assert timeline.bytes[at : at + 3] == (3, 5, 5)
    # x2 is out at 5, f3 ends at 7; x2 is back at 8.25, x1 at 9.25, before b3 ends.
    assert timeline.seconds == 21.0 + 1.25


def test_transfers_between_an_op_and_its_frees_see_what_it_wrote_over():
    # b writes g over x (4 bytes): while it runs, and until x is freed, there is one allocation.
    values = (Value("x", 4), Value("k", 1), Value("g", 4, output="backward"))
    ops = (
        Op("f", "forward", (), (0, 1)),
        Op("b", "backward", (0,), (2,), workspace=-4),
        Op("c", "backward", (1,), ()),
    )
    names = {"f": 0, "b": 1, "c": 2, "x": 0, "k": 1, "g": 2}
    text = "f +k ?k -k b <k -x ?k c -k"
    timeline = simulate(Problem(values, ops), steps(text, names), LINK)
    assert timeline.bytes == (5, 5, 5, 4, 4, 5, 5, 5, 5, 4)


@pytest.mark.parametrize(
    ("link", "message"),
    [
        ((0.0, 1.0), "offload_bandwidth is 0.0; it must be > 0"),
        ((1.0, -1.0), "reload_bandwidth is -1.0; it must be > 0"),
        ((float("nan"), 1.0), "offload_bandwidth is nan"),
        ((1.0, 1.0, -0.1), "latency is -0.1; it must be finite and >= 0"),
        ((1.0, 1.0, float("inf")), "latency is inf"),
    ],
)
def test_an_impossible_link_is_refused(link, message):
    with pytest.raises(InvalidOption, match=message):
        Link(*link)


@given(problems())
def test_an_endless_link_makes_offloading_free(problem):
    """Offload each kept value at the end of forward and reload it at once: no second is lost."""
    computes = replay(problem, [0] * len(problem.values))
    plain = Schedule.from_computes(problem, computes)
    boundary = plain.boundary(problem)
    forward_frees, kept = (
        {step.index for step in part if step.kind == "free"}
        for part in (plain.steps[:boundary], plain.steps[boundary:])
    )
    kept -= forward_frees  # those are not kept, but computed again
    alive = {
        v
        for step in plain.steps[:boundary]
        if step.kind == "compute"
        for v in problem.ops[step.index].writes
    } & kept
    detour = [Step(kind, v) for v in sorted(alive) for kind in ("offload", "wait", "free")]  # type: ignore[arg-type]
    detour += [Step(kind, v) for v in sorted(alive) for kind in ("reload", "wait")]  # type: ignore[arg-type]
    there_and_back = Schedule((*plain.steps[:boundary], *detour, *plain.steps[boundary:]))
    link = Link(float("inf"), float("inf"))
    assert simulate(problem, there_and_back, link).seconds == simulate(problem, plain).seconds


@given(problems())
def test_the_peak_is_the_largest_byte_count(problem):
    computes = replay(problem, [NEVER] * len(problem.values))
    timeline = simulate(problem, Schedule.from_computes(problem, computes))
    assert timeline.peak == max([*timeline.bytes, problem.fixed_bytes])
    assert timeline.peak == max(timeline.forward_peak, timeline.backward_peak, problem.fixed_bytes)
    assert timeline.peak >= least_peak(problem)[0]
