"""Real models that offload all they can: no bit differs, and the peak falls as planned."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import remat
from benchmarks.cells import measure_run
from remat.passes import transfers
from remat.solvers.problem import Link
from remat.solvers.simulate import simulate
from tests.models.steps import TrainingStep, differences, run_step
from tests.models.zoo import STEPS
from tests.passes.offloads import offload, offloadable

QUICK = ("running_scale",)


def everything_offloaded(step: TrainingStep, directory: Path) -> remat.Plan:
    """A stored plan that keeps nothing which may leave."""
    plan, link = remat.plan(step.model, step.args), Link(1e9, 1e9, 1e-5)
    problem, values = plan.problem, offloadable(plan.problem, plan.baseline)
    schedule = offload(problem, plan.baseline, values, window=4)
    timeline = simulate(problem, schedule, link)
    solution = dataclasses.replace(plan.solution, schedule=schedule, timeline=timeline)
    return dataclasses.replace(plan, solution=solution, link=link, offload=str(directory))


def _marked(name: str) -> Any:
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix)


@pytest.mark.parametrize("model", [_marked(name) for name in STEPS])
def test_a_model_that_offloads_everything(model: str, tmp_path: Path) -> None:
    step = STEPS[model]()
    wanted = run_step(step.model, step)
    given = everything_offloaded(step, tmp_path)
    torch._dynamo.reset()
    run = remat.compile(step.model, plan=given)
    assert differences(wanted, run_step(run, step)) == []
    assert differences(wanted, run_step(run, step)) == []
    (plan,) = run.plans
    assert isinstance(plan, remat.Plan)
    assert plan.offloaded_bytes == given.offloaded_bytes > 0.5 * plan.kept_bytes
    measured = measure_run(run, step)
    assert abs(measured.peak - plan.peak) <= 0.01 * plan.peak
    assert measured.peak < plan.baseline_peak
    assert transfers.stored_count() == 0
    assert list(tmp_path.iterdir()) == []
