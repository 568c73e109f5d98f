"""``remat.compile`` and ``remat.plan``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch

from remat.capture import check_trainable, fresh_function, plan_on_fake_tensors
from remat.options import Options
from remat.passes.torch_private import dynamo
from remat.plans import Plan, Unplanned
from remat.session import Session
from remat.sharing import StepPlan
from remat.solvers.errors import InvalidOption, RematError

_UNCOMPILED: Final = Unplanned(
    "torch ran this call without compiling it: its limit of graphs for one function is reached "
    "(torch._dynamo.config.recompile_limit; pad inputs to fewer shapes, or raise it), or "
    "compilation is turned off"
)


class Compiled:
    """What :func:`compile` returns: called like the model, and otherwise the model itself.

    Attributes:
        plans: one :class:`remat.Plan` for each captured graph, that of its latest call; what could
            not be planned stands there with the reason. Empty before the first call.
    """

    def __init__(self, model: Callable[..., Any], options: Options) -> None:
        self._model = model
        owner = model if isinstance(model, torch.nn.Module) else None
        self._session = Session(options, owner=owner)
        function = fresh_function(model)
        self._run = torch.compile(function, backend=self._session.backend, dynamic=False)

    @property
    def plans(self) -> tuple[Plan | Unplanned, ...]:
        """One for each captured graph; see the class."""
        return self._session.plans

    @property
    def step_plan(self) -> StepPlan | None:
        """How several graphs of a step share the budget, from the second step on; else None."""
        return self._session.step_plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = self._session.calls
        with self._session.entered((args, kwargs)):
            result = self._call(*args, **kwargs)
        if self._session.calls == before:
            self._session.say(_UNCOMPILED)
        return result

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._run(*args, **kwargs)
        except dynamo.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, RematError):
                raise error.inner_exception from None
            raise

    def __getattr__(self, name: str) -> Any:
        if name in ("_model", "_session", "_run"):
            raise AttributeError(name)
        return getattr(self._model, name)

    def __reduce__(self) -> tuple[Any, ...]:
        # A copy of the model is compiled anew: compiled code would train the original.
        return Compiled, (self._model, self._session.options)

    def __repr__(self) -> str:
        return f"remat.compile({self._model!r})"


def compile(model: Callable[..., Any], **options: Any) -> Compiled:
    """Compile a model, or a function that computes a loss, to train within a memory budget.

    The graph is captured, planned and split at the first call, and again for other shapes.

    Args:
        model: a module or a function of tensors.
        options: see :class:`remat.Options`; ``memory_budget`` above all.

    Returns:
        A callable to use like what ``torch.compile`` returns; ``.plans`` says what was decided.

    Raises:
        InvalidOption: an option is wrong, or the model has no trainable parameters.
        BudgetTooSmall: (at the first call) no plan keeps the budget.
        CaptureError: (at the first call) the model cannot be captured.
    """
    checked = Options.make(**options)
    if not callable(model):
        raise InvalidOption(f"remat.compile takes a module or a function, not {model!r}")
    check_trainable(model)
    return Compiled(model, checked)


def plan(
    model: torch.nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss: Callable[[Any], torch.Tensor] | None = None,
    **options: Any,
) -> Plan:
    """Plan a training step without running it: on fake tensors, nothing is allocated.

    Args:
        model: the module; neither it nor the arguments are touched.
        args, kwargs: what it is called with.
        loss: computes the loss from what the model returns, in the same graph.
        options: see :class:`remat.Options`.

    Returns:
        The plan of the step's graph; the same graph as that of a compiled function with this loss.

    Raises:
        InvalidOption: an option or argument is wrong.
        BudgetTooSmall: no plan keeps the budget.
        CaptureError: the step is not one graph.
    """
    checked = Options.make(**options)
    if not isinstance(model, torch.nn.Module):
        raise InvalidOption(f"remat.plan takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(args, torch.Tensor):
        raise InvalidOption("args must be a sequence of arguments: remat.plan(model, (x,))")
    check_trainable(model)
    return plan_on_fake_tensors(model, args, kwargs or {}, loss, checked)
