"""Predicted against measured, op by op: exact where the plan is, visible where it is wrong."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.passes import observe
from remat.plans import Plan, Unplanned
from remat.report.timeline import timeline_text
from remat.solvers.errors import InvalidOption, RematError
from remat.solvers.problem import Op
from remat.step_plan import StepPlan
from remat.timelines import MeasuredTimeline, measure_timeline

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


class Net(nn.Module):
    """Three blocks and a loss, optionally in two graphs."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.broken = broken
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.blocks[0](x)
        if self.broken:
            torch._dynamo.graph_break()
        for block in self.blocks[1:]:
            x = x + block(x)
        return x.square().mean()


def step_of(model: nn.Module, **options: Any) -> tuple[Callable[[], None], Any, Tensor]:
    """A step, what is compiled for it, and the batch."""
    batch = torch.randn(128, 32)
    compiled = remat.compile(model, executor="eager", time_limit=0.2, **options)

    def step() -> None:
        model.zero_grad()
        compiled(batch).backward()

    return step, compiled, batch


@dataclasses.dataclass
class Watched:
    model: nn.Module
    step: Callable[[], None]
    compiled: Any
    batch: Tensor
    timeline: MeasuredTimeline


@pytest.fixture(scope="module")
def watched() -> Watched:
    """A step within a budget, watched once."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Net()
    step, compiled, batch = step_of(model, memory_budget=0.2)
    return Watched(model, step, compiled, batch, measure_timeline(step, compiled))


def check_exact(timeline: MeasuredTimeline, plan: Plan) -> None:
    assert [row.deviation for row in timeline.ops] == [0] * len(timeline.ops)
    assert len(timeline.ops) + timeline.unseen == len(plan.solution.schedule.computes)
    assert timeline.predicted_peak == timeline.measured_peak == plan.peak
    assert timeline.largest() == ()
    assert {row.op.phase for row in timeline.ops} >= {"forward", "backward"}


def test_every_op_takes_what_was_predicted(watched: Watched) -> None:
    (plan,) = watched.compiled.plans
    check_exact(watched.timeline, plan)
    assert any(row.again for row in watched.timeline.ops)
    measured = remat.measure(watched.step, (watched.model, watched.batch))
    assert watched.timeline.measured_peak == measured.peak


def test_torchs_own_graphs_are_watched_too() -> None:
    step, compiled, _ = step_of(Net())
    timeline = measure_timeline(step, compiled, warmup=1)
    check_exact(timeline, compiled.plans[0])
    assert not any(row.again for row in timeline.ops)


def test_watching_changes_no_number_and_leaves_nothing_behind(watched: Watched) -> None:
    measure_timeline(watched.step, watched.compiled, warmup=1)
    parameters = list(watched.model.parameters())
    seen = [parameter.grad.clone() for parameter in parameters]
    watched.step()
    assert all(torch.equal(a, p.grad) for a, p in zip(seen, parameters, strict=True))
    assert observe._observer is None


def test_a_step_of_several_graphs_through_torch_compile() -> None:
    model, batch = Net(broken=True), torch.randn(128, 32)
    options = {"memory_budget": 0.3, "executor": "eager", "time_limit": 0.2}
    compiled = torch.compile(model, backend="remat", options=options)

    def step() -> None:
        model.zero_grad()
        compiled(batch).backward()

    timeline = measure_timeline(step, options)
    assert isinstance(timeline.plan, StepPlan)
    assert len(timeline.plan.plans) == 2
    halves = {row.op.name.split(":")[0] for row in timeline.ops}
    assert halves == {"0", "1"}
    steps = [row.step for row in timeline.ops]
    assert steps == sorted(steps)
    assert timeline.measured_peak <= timeline.plan.peak
    assert [row.deviation for row in timeline.ops if row.op.phase == "forward"][:3] == [0, 0, 0]


def test_the_last_of_several_runs_is_watched(watched: Watched) -> None:
    def accumulate() -> None:
        watched.model.zero_grad()
        for _ in range(3):
            watched.compiled(watched.batch).backward()

    timeline = measure_timeline(accumulate, watched.compiled, warmup=1)
    assert {row.deviation for row in timeline.ops} == {0}


def test_a_wrong_prediction_is_seen_where_it_is(watched: Watched) -> None:
    lied_about = watched.timeline.ops[5]
    ops = tuple(
        dataclasses.replace(row, predicted=row.predicted - 4096) if row is lied_about else row
        for row in watched.timeline.ops
    )
    wrong = dataclasses.replace(watched.timeline, ops=ops)
    (found,) = wrong.largest()
    assert (found.op, found.deviation) == (lied_about.op, 4096)
    assert "+4.00 KiB" in str(wrong)
    assert lied_about.op.target in str(wrong).splitlines()[-1]
    assert lied_about.op.target not in str(watched.timeline).splitlines()[-1]


def show_plans(watched: Watched, patch: pytest.MonkeyPatch, *plans: Plan | Unplanned) -> None:
    patch.setattr(type(watched.compiled), "plans", property(lambda self: plans))


@pytest.mark.parametrize(
    ("executor", "why"), [("inductor", "fused kernels"), ("cudagraph", "replays a recording")]
)
def test_what_others_run_is_refused_in_words(
    executor: str, why: str, watched: Watched, plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = dataclasses.replace(plan, executor=executor, replayed_peak=1444)
    show_plans(watched, monkeypatch, theirs)
    with pytest.raises(RematError, match=rf"{why}.*1408 bytes were estimated.*peak is 1444.*eager"):
        measure_timeline(watched.step, watched.compiled, warmup=0)


def test_what_has_no_plan_is_refused(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    show_plans(watched, monkeypatch, Unplanned("nothing trains"))
    with pytest.raises(RematError, match=r"has 0 planned graphs.*nothing trains"):
        measure_timeline(watched.step, watched.compiled, warmup=0)


def test_half_a_step_is_refused(watched: Watched) -> None:
    with pytest.raises(RematError, match="1 forwards and 0 backwards of the planned graph"):
        measure_timeline(lambda: watched.compiled(watched.batch), watched.compiled, warmup=0)


def test_wrong_arguments_are_refused(watched: Watched) -> None:
    with pytest.raises(InvalidOption, match="warmup is -1"):
        measure_timeline(watched.step, watched.compiled, warmup=-1)
    with pytest.raises(InvalidOption, match="given int as compiled"):
        measure_timeline(watched.step, 7, warmup=1)  # type: ignore[arg-type]
    with pytest.raises(RematError, match="device 'mps'"):
        observe.Observer("mps")


def test_a_step_planned_again_meanwhile_is_said(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    (plan,) = watched.compiled.plans
    solution = dataclasses.replace(
        plan.solution, schedule=plan.baseline, timeline=plan.baseline_timeline
    )
    show_plans(watched, monkeypatch, dataclasses.replace(plan, solution=solution))
    with pytest.raises(RematError, match="planned again in the meantime"):
        measure_timeline(watched.step, watched.compiled, warmup=1)


def test_one_at_a_time_and_beside_no_profiler() -> None:
    with (
        observe.Observer(),
        pytest.raises(RematError, match="watched already"),
        observe.Observer(),
    ):
        pass
    with torch.autograd.profiler.profile(), pytest.raises(RematError, match="already running"):
        observe.Observer().__enter__()
    with observe.Observer() as again:  # the failed ones left nothing behind
        pass
    assert again.runs == []


def test_the_report_fits_a_terminal(plan: Plan) -> None:
    op = Op("a_long_name", "backward", (), (), target="aten.some_operator.default" * 3)
    rows = [(op, 1000 * k, 1000 * k + k % 7) for k in range(200)]
    lines = timeline_text(rows, 3, 512).splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "and 161 more ops (timeline.largest)" in lines
    assert timeline_text([], 2, 0) == "timeline   no op of a planned graph ran"
    empty = MeasuredTimeline(plan, (), 0, 100)
    assert (empty.predicted_peak, empty.measured_peak) == (100, 100)
