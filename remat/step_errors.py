"""Why a step could not be traced, in words that say where it stands and what to do."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Final

import torch

from remat.passes.torch_private import tracing
from remat.solvers.errors import CaptureError

_TORCH: Final = Path(torch.__file__).parent
_REMAT: Final = Path(__file__).parent
_UPDATES: Final = _TORCH / "optim"
_LAYERS: Final = _TORCH / "nn" / "modules"
_OF_NUMBERS: Final = (
    "SymFloat.__format__", "SymInt.__format__", ".numpy() is not supported", "Mixing fake modes",
)  # fmt: skip
_AROUND: Final = ("lr_scheduler.py", "swa_utils.py", "module.py", "container.py", "optimizer.py")
"""Files of torch that call what is the caller's, or are called beside an update."""


def explained(error: Exception) -> CaptureError | None:
    """What stands in the way, or None if the error is the step's own."""
    text = str(error)
    if isinstance(error, tracing.DEPENDS_ON_DATA):
        return CaptureError(_asks_for_content(error))
    if any(mark in text for mark in _OF_NUMBERS):
        file, line, name = _place(error)
        return CaptureError(
            "the step takes a tensor, or a number of one, out of PyTorch (text, NumPy, deepcopy), "
            f"which one graph cannot ({file.name}, line {line}, in {name}: {_first_line(error)}): "
            "return the tensor, and do so outside"
        )
    if "backward() through example input" in text:
        return CaptureError(
            "the step names a tensor that was computed outside, with its autograd history, and "
            "backward goes on there: compute it in the step, or detach it"
        )
    if "SparseTensorImpl" in text:
        return CaptureError(
            "the step makes or is given a sparse tensor (Embedding(sparse=True)), and this version "
            "plans dense ones: make the layer with sparse=False, or use remat.compile without it"
        )
    if "symbolically trace a dynamo-optimized" in text:
        return CaptureError(
            "the step calls what torch.compile or another compiler has made: hand over the module "
            "or the function itself, it becomes a part of the step's graph"
        )
    if "convert all Tensors to FakeTensors" in text:
        return CaptureError(
            "the step reads a tensor that is no argument, no variable it names, and in none of the "
            "modules and optimizers it names: hand it over as an argument, or its module by state="
        )
    return None


def _asks_for_content(error: Exception) -> str:
    file, line, name = _place(error)
    at = f"{file.name}, line {line}, in {name}"
    if _UPDATES in file.parents:
        return (
            "the optimizer of the step cannot be a part of one graph: it reads its rate or a count "
            f"as a number, and goes on from there ({at}). Make it with fused=False, or take one "
            "that only computes with them (SGD, Adam, AdamW, NAdam, Adamax, Adagrad, Adadelta, "
            "RMSprop, Rprop); or use remat.compile, and step outside"
        )
    if _LAYERS in file.parents:
        help_ = "give BatchNorm a momentum, not None; or " * (file.stem == "batchnorm")
        return (
            "a layer of the step reads the content of a tensor, and goes on from there, which one "
            f"graph cannot ({at}): {help_}use remat.compile"
        )
    return (
        "the step asks a tensor for its content and goes on from there (item(), bool(), a size "
        f"that depends on data), which one graph cannot ({at}: {_first_line(error)}): move it out "
        "of the step, or use remat.compile"
    )


def _place(error: Exception) -> tuple[Path, int, str]:
    """The innermost line of the caller's, of an optimizer or of a layer: (file, line, function)."""
    found = (Path("the step"), 0, "?")
    for frame in traceback.extract_tb(error.__traceback__):
        file = Path(frame.filename)
        inside = {_TORCH, _REMAT} & set(file.parents)
        part = {_UPDATES, _LAYERS} & set(file.parents) and file.name not in _AROUND
        if not inside or part:
            found = (file, frame.lineno or 0, frame.name)
    return found


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
