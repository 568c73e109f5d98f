"""The files of plans: that of a whole step, and the schema that describes both kinds."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from remat.plans import Plan
from remat.report.schema import plan_schema, schema_text
from remat.solvers.errors import PlanMismatch
from remat.solvers.problem import Link
from remat.step_plan import StepPlan

ROOT = Path(__file__).parents[2]


def test_a_stored_step_is_the_same_step(step_plan: StepPlan, tmp_path: Path) -> None:
    step_plan.save(tmp_path / "step.json.gz")
    loaded = StepPlan.load(tmp_path / "step.json.gz")
    assert loaded == step_plan
    assert str(loaded) == str(step_plan)


def test_a_plan_that_two_calls_share_is_stored_once(step_plan: StepPlan) -> None:
    data = step_plan.to_json()
    assert (len(data["plans"]), data["calls"]) == (2, [0, 1])


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("format", "remat.plan/1", "reads 'remat.step/1' as the plan of a step"),
        ("calls", [0, 7], "malformed plan: IndexError"),
        ("calls", [0, -1], "a call is of plan -1; it must be an index"),
        ("memory_budget", "8GiB", "memory_budget is '8GiB', which is no number of bytes"),
        ("resident", 999, "the solution belongs to another problem"),
        ("baseline", [["compute", 0]], "the stored plan cannot run"),
        ("phases", [{"kind": "sideways", "call": 0, "beside": 0}], "unknown phase"),
    ],
)
def test_an_edited_step_is_refused(
    step_plan: StepPlan, tmp_path: Path, field: str, value: Any, message: str
) -> None:
    path = tmp_path / "step.json"
    path.write_text(json.dumps({**step_plan.to_json(), field: value}))
    with pytest.raises(PlanMismatch, match=message) as refused:
        StepPlan.load(path)
    assert str(path) in str(refused.value)


def test_the_published_schema_is_the_one_in_the_code() -> None:
    """After a change of remat/report/schema.py:
    ``remat export --to schema -o docs/plan.schema.json --force``.
    """
    assert (ROOT / "docs" / "plan.schema.json").read_text(encoding="utf-8") == schema_text()


def check_fields(data: Any, schema: Any, definitions: dict[str, Any]) -> None:
    """Every field that is written stands in the schema."""
    if "anyOf" in schema:  # or null
        schema = schema["anyOf"][0]
    while "$ref" in schema:
        schema = definitions[schema["$ref"].rsplit("/", 1)[-1]]
    if isinstance(data, dict):
        assert set(data) <= set(schema["properties"]), set(data) - set(schema["properties"])
        for name, item in data.items():
            check_fields(item, schema["properties"][name], definitions)
    if isinstance(data, list) and isinstance(schema.get("items"), dict):
        for item in data:
            check_fields(item, schema["items"], definitions)


def variants(plan: Plan, step_plan: StepPlan) -> dict[str, dict[str, Any]]:
    dropped = dataclasses.replace(
        plan.problem,
        values=tuple(
            dataclasses.replace(value, keepable=value.name != "a") for value in plan.problem.values
        ),
    )
    patterned = dataclasses.replace(
        plan,
        problem=dropped,
        solution=dataclasses.replace(plan.solution, problem_key=dropped.key),
        keep=("blocks.1",),
        recompute=("blocks.0",),
    )
    nothing_fits = dataclasses.replace(plan.solution, lower_bound=float("inf"), status="infeasible")
    return {
        "eager": plan.to_json(),
        "inductor": dataclasses.replace(plan, executor="inductor", replayed_peak=9).to_json(),
        "without a budget": dataclasses.replace(
            plan, memory_budget=None, least_peak=None
        ).to_json(),
        "patterns": patterned.to_json(),
        "offload": dataclasses.replace(plan, offload="host", link=Link(1e9, 2e9)).to_json(),
        "nothing fits": dataclasses.replace(plan, solution=nothing_fits).to_json(),
        "step": step_plan.to_json(),
    }


def test_every_kind_of_plan_follows_the_schema(plan: Plan, step_plan: StepPlan) -> None:
    schema = plan_schema()
    for data in variants(plan, step_plan).values():
        kind = "step_plan" if data["format"].startswith("remat.step/") else "plan"
        check_fields(data, schema["$defs"][kind], schema["$defs"])
    jsonschema = pytest.importorskip("jsonschema")
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for name, data in variants(plan, step_plan).items():
        assert list(validator.iter_errors(json.loads(json.dumps(data)))) == [], name
    wrong: list[tuple[str, Any]] = [
        ("format", "remat.plan/2"), ("baseline", [["jump", 0]]), ("notes", [1]), ("device", None),
        ("memory_budget", "8GiB"), ("graph_hash", "no hash"), ("problem", {}), ("link", {}),
        ("solution", {**plan.to_json()["solution"], "status": "good"}),
    ]  # fmt: skip
    for field, value in wrong:
        data = json.loads(json.dumps({**plan.to_json(), field: value}))
        assert not validator.is_valid(data), field
