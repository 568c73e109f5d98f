"""The ``torch.compile`` backend: ``torch.compile(model, backend="remat", options={...})``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from remat.options import Options
from remat.session import Session


def backend(
    graph: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Plan and compile one captured graph.

    Args:
        options: see :class:`remat.Options`.

    Raises:
        RematError: an option is wrong, or no plan keeps the budget. torch wraps what a backend
            raises in ``BackendCompilerFailed``, whose ``inner_exception`` is the error.
    """
    return Session(Options.make(**dict(options or {}))).backend(graph, example_inputs)
