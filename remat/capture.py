"""Capture a training step on fake tensors: nothing is run, nothing allocated."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import fx

from remat.cost.device import described_capability, find_device
from remat.executors import eager, inductor
from remat.executors.cudagraph import as_planned
from remat.measurement import resident_bytes, resident_tensors
from remat.options import Options
from remat.partitioner import Ledger, partition
from remat.passes.attention import route_attention
from remat.passes.storages import main_device
from remat.passes.torch_private import dynamo
from remat.plan_log import log_plan
from remat.plans import Plan
from remat.session import not_one_graph
from remat.solvers.errors import CaptureError, InvalidOption, RematError


class _Done(Exception):
    """Ends a capture as soon as the plan is made."""


def plan_on_fake_tensors(
    model: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    loss: Callable[[Any], torch.Tensor] | None,
    options: Options,
) -> Plan:
    """Plan the training step ``loss(model(*args, **kwargs))``.

    The joint graph is the one a run of the compiled step has, and so is its hash.

    Raises:
        CaptureError: the step is not one graph, or nothing in it trains.
        BudgetTooSmall: no plan fits.
    """
    options = as_planned(options)
    capability = described_capability(options.device)
    mode = dynamo.fake_mode()
    fake_model, (fake_args, fake_kwargs) = _copy(mode, model, args, kwargs)
    made: list[Plan] = []

    def split(
        joint: fx.GraphModule, joint_inputs: Any, **torch_options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        optimizer = options.optimizer
        there = (model, tuple(args), dict(kwargs), optimizer)
        device = main_device(resident_tensors(there))
        granularity = None if options.device is None else find_device(options.device).granularity
        resident = resident_bytes(there, device, granularity)
        ledger = Ledger(resident=resident, device_exists=False)
        made.append(partition(joint, joint_inputs, options, ledger, **torch_options).plan)
        log_plan(made[0])
        raise _Done

    def backend(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        if capability is not None:
            route_attention(graph, capability)
        if options.executor == "inductor":
            inductor.compile_graph(graph, inputs, partition=split, key=secrets.token_hex(8))
            _refuse_inference(graph)
        eager.compile_graph(graph, inputs, partition=split, on_inference=_refuse_inference)
        raise CaptureError("AOTAutograd never split the graph; report this with the model")

    step = fresh_function(fake_model, loss)
    run = torch.compile(step, backend=backend, dynamic=False, fullgraph=True)
    with mode, torch.enable_grad():
        try:
            run(*fake_args, **fake_kwargs)
        except dynamo.Unsupported as error:
            raise not_one_graph(dynamo.break_of(error)) from None
        except dynamo.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, _Done):
                return made[0]
            if isinstance(error.inner_exception, RematError):
                raise error.inner_exception from None
            raise CaptureError(f"capturing failed: {error.inner_exception}") from error
    raise CaptureError(
        "Dynamo captured no graph of this step (it skipped the function); "
        "TORCH_LOGS=dynamo says why"
    )


def _copy(
    mode: Any, model: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Any]:
    try:
        return dynamo.fake_copy(mode, model, (tuple(args), dict(kwargs)))
    except (TypeError, RuntimeError, NotImplementedError) as error:
        raise CaptureError(
            f"{type(model).__name__} cannot be copied onto fake tensors ({error}); compile it with "
            "remat.compile and read .plans after the first step"
        ) from error


def fresh_function(
    model: Callable[..., Any], loss: Callable[[Any], torch.Tensor] | None = None
) -> Callable[..., Any]:
    """``loss(model(...))`` as a function that Dynamo has not seen before.

    Dynamo's caches, and its limit of eight graphs, belong to code objects: all ``nn.Sequential`` of
    a process share one, and so do all instances of a class. The ninth would run uncompiled.
    """

    def step(*args: Any, **kwargs: Any) -> Any:
        result = model(*args, **kwargs)
        return result if loss is None else loss(result)

    code = step.__code__.replace(co_name=f"step_of_{type(model).__name__}")
    return FunctionType(code, step.__globals__, "step", step.__defaults__, step.__closure__)


def _refuse_inference(_graph: fx.GraphModule) -> None:
    raise CaptureError("nothing in this step needs a gradient, so there is nothing to plan")


def check_trainable(model: object) -> None:
    """Refuse a module none of whose parameters is trained.

    Raises:
        InvalidOption: with what to do about it.
    """
    if not isinstance(model, torch.nn.Module):
        return
    parameters = list(model.parameters())
    if not any(parameter.requires_grad for parameter in parameters):
        raise InvalidOption(
            f"{type(model).__name__} has no trainable parameters ({len(parameters)} in all, none "
            "with requires_grad): there is no backward to plan; unfreeze what is to be trained, or "
            "use torch.compile"
        )
