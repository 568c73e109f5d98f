"""``remat.compile`` and ``remat.plan``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from remat.capture import check_trainable, plan_on_fake_tensors
from remat.compiled import Compiled, make_compiled
from remat.options import Options
from remat.passes.torch_private import dynamo
from remat.plans import Plan
from remat.solvers.errors import InvalidOption


def compile(model: Callable[..., Any], **options: Any) -> Compiled:
    """Compile a model, or a function that computes a loss, to train within a memory budget.

    The graph is captured, planned and split at the first call, and again for other shapes.

    Args:
        model: a module or a function of tensors.
        options: see :class:`remat.Options`; ``memory_budget`` above all.

    Returns:
        A callable to use like what ``torch.compile`` returns; ``.plans`` says what was decided. For
        a module it is one, of the same parameters under the same names.

    Raises:
        InvalidOption: an option is wrong, the model has no trainable parameters, or is compiled
            already.
        BudgetTooSmall: (at the first call) no plan keeps the budget.
        CaptureError: (at the first call) the model cannot be captured.
    """
    checked = Options.make(**options)
    if not callable(model):
        raise InvalidOption(f"remat.compile takes a module or a function, not {model!r}")
    _refuse_compiled(model)
    check_trainable(model)
    return make_compiled(model, checked)


def _refuse_compiled(model: object) -> None:
    if isinstance(model, Compiled):
        raise InvalidOption(
            "remat.compile was given what remat.compile returned: it is compiled already; to "
            "change its options compile the model itself again"
        )
    if dynamo.is_compiled(model):
        raise InvalidOption(
            "remat.compile was given a model that torch.compile, or its own compile(), has "
            "compiled, and one model is compiled once: give it the model itself (_orig_mod of what "
            "torch.compile returned)"
        )


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
    if checked.double_backward:
        raise InvalidOption(
            "double_backward=True runs a graph that trains uncompiled and unplanned, so there is "
            "nothing to plan; leave it out here, and give it to remat.compile"
        )
    if not isinstance(model, torch.nn.Module):
        raise InvalidOption(f"remat.plan takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(args, torch.Tensor):
        raise InvalidOption("args must be a sequence of arguments: remat.plan(model, (x,))")
    check_trainable(model)
    return plan_on_fake_tensors(model, args, kwargs or {}, loss, checked)
