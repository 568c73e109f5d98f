"""The ``torch.compile`` backend: ``torch.compile(model, backend="remat", options={...})``.

torch hands the very object given as ``options`` to every call of the backend, so graphs compiled
with one object are one session and share its budget: the several graphs of a model with graph
breaks, and the blocks of a model that are compiled one by one with the same object.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final
from weakref import WeakValueDictionary

from torch import fx

from remat.options import Options
from remat.plans import Plan, Unplanned
from remat.session import Session
from remat.solvers.errors import InvalidOption
from remat.step_plan import StepPlan

# By the id of the object, which its session keeps alive; a session lives as long as its graphs.
_SESSIONS: Final[WeakValueDictionary[int, Session]] = WeakValueDictionary()


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
    return _session(options).backend(graph, example_inputs)


def plans_of(options: Mapping[str, Any]) -> tuple[Plan | Unplanned, ...]:
    """The plans of what was compiled with this ``options`` object, one for each captured graph.

    Raises:
        InvalidOption: nothing was compiled with it; an equal one is another.
    """
    return _known_session(options).plans


def step_plan_of(options: Mapping[str, Any]) -> StepPlan | None:
    """How several graphs compiled with this ``options`` object share its budget, from the second
    step on; None for one graph.

    Raises:
        InvalidOption: nothing was compiled with it; an equal one is another.
    """
    return _known_session(options).step_plan


def _session(options: Mapping[str, Any] | None) -> Session:
    session = None if options is None else _SESSIONS.get(id(options))
    checked = Options.make(**dict(options or {}))
    if session is not None and session.options == checked:
        return session
    session = Session(checked, given=options)
    if options is not None:
        _SESSIONS[id(options)] = session
    return session


def _known_session(options: Mapping[str, Any]) -> Session:
    session = _SESSIONS.get(id(options))
    if session is None:
        raise InvalidOption(
            "nothing was compiled with this options object yet; keep the object that torch.compile "
            "was given (an equal one is another), and read its plans after the first step"
        )
    return session
