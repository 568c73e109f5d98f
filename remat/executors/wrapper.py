"""The peak that counts under inductor, replayed from the wrappers it generates.

A wrapper is a Python function that allocates buffers, calls kernels on them, reuses and deletes
them; :mod:`remat.executors.wrapper_run` runs one. Here the two halves make a step: who holds what
between them, and what autograd does with the gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from remat.executors.wrapper_memory import Memory, Workspace, no_workspace
from remat.executors.wrapper_names import Names
from remat.executors.wrapper_run import Generated, Moment, Run, TensorSpec
from remat.passes.torch_private import dynamo
from remat.solvers.errors import RematError


@dataclass(frozen=True)
class StepReplay:
    """A whole step, replayed; all bytes include the resident ones.

    Attributes:
        peak: the most bytes alive at a time.
        where: the statement that reaches it first.
        forward_peak, backward_peak: of either half.
        saved: bytes that live only for backward between the halves.
        moments: every statement in order; of a branch, one way after the other.
    """

    peak: int
    where: Moment
    forward_peak: int
    backward_peak: int
    saved: int
    moments: tuple[Moment, ...]


def replay_step(
    forward: Generated,
    backward: Generated,
    *,
    resident: int = 0,
    granularity: int = 1,
    device_type: str = "cpu",
    workspace: Workspace = no_workspace,
) -> StepReplay:
    """The peak of forward and backward, run one after the other.

    Forward's inputs belong to the caller, who holds its outputs to the end. Saved tensors and
    gradients of outputs live until the wrapper drops them; the gradient of a loss, a single
    number, is held by whoever calls ``backward()``. Gradients of parameters live to the end, and
    one whose layout is not its parameter's is copied when it is accumulated. Where a wrapper
    branches on the content of a tensor (``torch.cond``), both branches are gone through, and what
    either holds is held.

    Args:
        resident: bytes alive whatever the step does, forward's inputs among them.
        granularity: the allocator hands out multiples of this many bytes.
        device_type: bytes on other kinds of device are not counted.
        workspace: what library kernels take beyond their results.

    Raises:
        RematError: a wrapper has a statement that cannot be replayed; the message names it.
    """
    with dynamo.fake_mode(), torch.no_grad():
        memory = Memory(granularity, device_type)
        names = Names(memory, workspace)
        outputs, saved, first = _replay_forward(forward, backward, names)
        held = memory.bytes_of(outputs)
        saved_bytes = memory.level - held
        second = _replay_backward(forward, backward, names, saved)
    moments = tuple(_shifted(moment, resident) for moment in (*first, *second))
    where = max(moments, key=lambda moment: moment.peak)
    peaks = {
        kind: max((m.peak for m in moments if m.kind == kind), default=resident)
        for kind in ("forward", "backward")
    }
    return StepReplay(where.peak, where, peaks["forward"], peaks["backward"], saved_bytes, moments)


def replay_inference(
    generated: Generated,
    *,
    resident: int = 0,
    granularity: int = 1,
    device_type: str = "cpu",
    workspace: Workspace = no_workspace,
) -> tuple[Moment, ...]:
    """The statements of a single graph whose inputs belong to the caller; see ``replay_step``."""
    with dynamo.fake_mode(), torch.no_grad():
        memory = Memory(granularity, device_type)
        args = [spec and spec.fake() for spec in generated.inputs]
        memory.own(args)
        run = Run(generated, Names(memory, workspace))
        run.call(args)
    return tuple(_shifted(moment, resident) for moment in run.moments)


def _replay_forward(
    forward: Generated, backward: Generated, names: Names
) -> tuple[list[Any], list[Any], list[Moment]]:
    """(outputs, saved tensors, statements) of the forward."""
    args = [spec and spec.fake() for spec in forward.inputs]
    names.memory.own(args)
    owned = list(args)
    run = Run(forward, names)
    returned = list(run.call(args))
    expected = [spec for spec in backward.inputs if spec is None or not spec.tangent]
    split = len(returned) - len(expected)
    saved = returned[split:]
    for value, spec in zip(saved, expected, strict=False):
        if split < 0 or not _fits(value, spec):
            raise RematError(
                f"backward takes {spec.name if spec else None!r} where forward saves "
                f"{_describe(value)}: the two wrappers do not belong together"
            )
    outputs = returned[forward.copied : split]
    del returned, owned
    names.memory.release()
    return outputs, saved, run.moments


def _replay_backward(
    forward: Generated, backward: Generated, names: Names, saved: list[Any]
) -> list[Moment]:
    """The statements of the backward; empties ``saved``."""
    tangents = [spec.fake() for spec in backward.inputs if spec is not None and spec.tangent]
    names.memory.adopt(tangents)
    held = [tangent for tangent in tangents if tangent.numel() == 1]
    args = [*saved, *tangents]
    saved.clear()
    tangents.clear()
    run = Run(backward, names)
    gradients = list(run.call(args))
    _accumulate(forward, gradients, run)
    del held
    return run.moments


def _accumulate(forward: Generated, gradients: list[Any], run: Run) -> None:
    """Autograd takes a gradient over if its layout is the parameter's and nobody else holds it."""
    memory = run.names.memory
    memory.reset_peak()
    copies, seen = [], set()
    for index, (gradient, spec) in enumerate(zip(gradients, forward.inputs, strict=False)):
        if gradient is None or spec is None:
            continue
        if id(gradient) in seen or not _is_taken_over(gradient, spec):
            copies.append(
                torch.empty_strided(
                    gradient.shape, gradient.stride(), dtype=gradient.dtype, device=gradient.device
                )
            )
            memory.adopt(copies)
            gradients[index] = None
        seen.add(id(gradient))
        del gradient
        memory.release()
    if copies:
        run.note(0, "accumulating gradients")


def _is_taken_over(gradient: torch.Tensor, parameter: TensorSpec) -> bool:
    """Whether the gradient has the layout that autograd wants for ``parameter``."""
    wanted = parameter.stride
    if not _is_dense(parameter):
        wanted = torch.empty(parameter.shape, device="meta").stride()
    return all(
        ours == theirs
        for ours, theirs, size in zip(gradient.stride(), wanted, gradient.shape, strict=True)
        if size != 1
    )


def _is_dense(spec: TensorSpec) -> bool:
    """Every element of the storage belongs to exactly one index."""
    expected = 1
    for stride, size in sorted(zip(spec.stride, spec.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _fits(value: Any, spec: TensorSpec | None) -> bool:
    if spec is None or not isinstance(value, torch.Tensor):
        return spec is None and not isinstance(value, torch.Tensor)
    return (tuple(value.shape), value.dtype) == (spec.shape, spec.dtype)


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of {value.dtype}{list(value.shape)}"
    return repr(value)


def _shifted(moment: Moment, resident: int) -> Moment:
    return Moment(
        moment.kind, moment.line, moment.text, moment.peak + resident, moment.after + resident
    )
