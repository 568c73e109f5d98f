"""Private torch: artifacts in the structured trace that ``TORCH_TRACE=folder`` asks for.

``TORCH_LOGS`` needs nothing private: a name in it that is no alias of torch's own is taken for a
module, and the logger of that name is set up, so ``TORCH_LOGS=remat`` (what was planned) and
``TORCH_LOGS=+remat`` (the whole plan) work on ``logging.getLogger("remat")``. An *artifact* of the
kind ``TORCH_LOGS=guards`` cannot be registered from outside: torch reads the variable when it is
imported, and refuses names that are not registered by then.
"""

from __future__ import annotations

from collections.abc import Callable

from torch._logging import trace_structured


def add_artifact(name: str, payload: Callable[[], str]) -> None:
    """Add JSON text to the trace, under the graph that is being compiled, if there is one.

    Args:
        name: the artifact's; ``tlparse`` lists it by this name.
        payload: called only if a trace is being written.
    """
    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": "json"},
        payload_fn=payload,
        expect_trace_id=False,
    )
