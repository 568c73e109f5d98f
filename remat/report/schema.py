"""The JSON Schema of stored plans, published as ``docs/plan.schema.json``.

``remat export --to schema`` prints it. A plan of one graph has the format ``remat.plan/1``, that of
a whole step ``remat.step/1``. A file may hold more fields than the schema names; those it names are
there and mean what is said here, as long as the format's number stays.
"""

from __future__ import annotations

import json
from typing import Any, Final

DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"


def schema_text() -> str:
    """The schema as JSON text, indented."""
    return json.dumps(plan_schema(), indent=2, ensure_ascii=False) + "\n"


def plan_schema() -> dict[str, Any]:
    """The schema as plain data."""
    return {
        "$schema": DIALECT,
        "title": "A plan of remat",
        "description": "How a training step runs within a memory budget. All sizes are bytes, all "
        "times seconds. What a step takes in bytes follows from its schedule and is not stored.",
        "oneOf": [{"$ref": "#/$defs/plan"}, {"$ref": "#/$defs/step_plan"}],
        "$defs": {
            "plan": _plan(),
            "step_plan": _step_plan(),
            "problem": _problem(),
            "value": _value(),
            "op": _op(),
            "solution": _solution(),
            "schedule": _schedule(),
        },
    }


def _plan() -> dict[str, Any]:
    return _object(
        "The plan of one captured graph.",
        optional={
            "replayed_peak": _or_null(_bytes("peak of the code inductor generated, which is what "
                                             "counts; null for the eager executor")),
            "keep": _texts("patterns of modules the user wants kept"),
            "recompute": _texts("patterns of modules the user wants computed again"),
            "link": _or_null(_link()),
            "offload": _or_null(_text('where to: "host", or a directory')),
        },
        format={"const": "remat.plan/1"},
        remat_version=_text("the version that made it"),
        torch_version=_text("the version of torch it was made under"),
        device=_text("what its costs are for"),
        executor={"enum": ["eager", "inductor", "cudagraph"], "description": "who runs it"},
        graph_hash=_hash("of the joint graph, without names"),
        memory_budget=_or_null(_bytes("what was asked for")),
        least_peak=_or_null(_bytes("the smallest peak a plan was found for")),
        notes=_texts("for people"),
        problem={"$ref": "#/$defs/problem"},
        solution={"$ref": "#/$defs/solution"},
        baseline={"$ref": "#/$defs/schedule"},
    )  # fmt: skip


def _link() -> dict[str, Any]:
    rate = {"type": "number", "exclusiveMinimum": 0, "description": "bytes a second"}
    return _object(
        "How fast values can be offloaded and come back.",
        offload_bandwidth=rate,
        reload_bandwidth=rate,
        latency={"type": "number", "minimum": 0, "description": "seconds of any transfer"},
    )


def _step_plan() -> dict[str, Any]:
    phase = _object(
        "A part of the step in which one thing runs.",
        kind={"enum": ["forward", "backward", "eager"]},
        call={"type": "integer", "minimum": -1, "description": "which call; -1 for eager code"},
        beside=_bytes("alive beside the graphs"),
    )
    return _object(
        "The plan of a whole step of several graphs, or of one and the code outside it.",
        format={"const": "remat.step/1"},
        memory_budget=_bytes("of the whole step"),
        least_peak=_or_null(_bytes("the smallest peak a plan was found for")),
        resident=_bytes("alive when the step begins"),
        plans=_list({"$ref": "#/$defs/plan"}, "one for each plan that differs"),
        calls=_list(_count("index into plans"), "the plan of each call, in order of forwards"),
        phases=_list(phase, "in the order they run"),
        solution={"$ref": "#/$defs/solution"},
        baseline={"$ref": "#/$defs/schedule"},
    )


def _problem() -> dict[str, Any]:
    return _object(
        "The ops of the step, the storages they touch, their costs.",
        format={"const": "remat.problem/1"},
        name=_text("for people"),
        cost=_text("how seconds were modelled"),
        fixed_bytes=_bytes("alive whatever the plan: parameters, inputs, state"),
        values=_list({"$ref": "#/$defs/value"}, "storages; others refer to them by index"),
        ops=_list({"$ref": "#/$defs/op"}, "in program order; steps refer to them by index"),
    )


def _value() -> dict[str, Any]:
    return _object(
        "One storage.",
        optional={"keepable": _flag("may be alive when backward starts; true where absent")},
        name=_text("unique among the values"),
        bytes=_bytes("what the allocator hands out for it"),
        owned=_flag("the caller's; counted in fixed_bytes"),
        tangent=_flag("arrives when backward starts"),
        output={"enum": [None, "forward", "backward"], "description": "which part returns it"},
        offloadable=_flag("may be copied to another tier"),
    )


def _op() -> dict[str, Any]:
    return _object(
        "One operation.",
        name=_text("unique among the ops"),
        phase={"enum": ["forward", "deferred", "backward"]},
        reads=_list(_count("index of a value"), "what it reads"),
        writes=_list(_count("index of a value"), "what it makes"),
        seconds={"type": "number", "minimum": 0},
        flops=_count("floating point operations"),
        workspace={"type": "integer", "description": "bytes it allocates and releases while it "
                   "runs; below 0 where it writes over an input"},
        target=_text("the operator"),
        random=_flag("draws random numbers"),
        rerunnable=_flag("may be run a second time"),
        layer=_text("path of its module"),
        source=_text("file:line in function"),
    )  # fmt: skip


def _solution() -> dict[str, Any]:
    return _object(
        "A schedule, and what is known about it.",
        problem_key=_hash("of the problem's canonical JSON"),
        memory_budget=_or_null(_bytes("what was asked for")),
        status={"enum": ["optimal", "feasible", "infeasible", "not found"]},
        lower_bound=_or_null({"type": "number", "minimum": 0, "description": "seconds no schedule "
                              "within the budget can beat; null where nothing fits"}),
        peak_lower_bound=_bytes("no schedule peaks below"),
        floor_op={"type": "integer", "minimum": -1, "description": "the op that sets it, or -1"},
        solver=_text("the algorithm that found it"),
        solve_time={"type": "number", "minimum": 0},
        steps={"$ref": "#/$defs/schedule"},
        peak=_bytes("of the steps, as simulated"),
        failures=_texts("what went wrong on the way"),
    )  # fmt: skip


def _schedule() -> dict[str, Any]:
    step = {
        "type": "array",
        "prefixItems": [
            {"enum": ["compute", "free", "offload", "reload", "wait"]},
            _count("index of an op (compute) or of a value"),
        ],
        "items": False,
        "minItems": 2,
    }
    return _list(step, "every step, in order")


def _object(
    description: str, optional: dict[str, Any] | None = None, **required: Any
) -> dict[str, Any]:
    return {
        "type": "object",
        "description": description,
        "required": list(required),
        "properties": {**required, **(optional or {})},
    }


def _list(items: Any, description: str) -> dict[str, Any]:
    return {"type": "array", "items": items, "description": description}


def _texts(description: str) -> dict[str, Any]:
    return _list({"type": "string"}, description)


def _text(description: str) -> dict[str, Any]:
    return {"type": "string", "description": description}


def _hash(description: str) -> dict[str, Any]:
    pattern = "^[0-9a-f]{64}$"
    return {"type": "string", "pattern": pattern, "description": f"SHA-256: {description}"}


def _flag(description: str) -> dict[str, Any]:
    return {"type": "boolean", "description": description}


def _count(description: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "description": description}


def _bytes(description: str) -> dict[str, Any]:
    return {"type": "integer", "minimum": 0, "description": f"bytes: {description}"}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}
