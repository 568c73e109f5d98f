"""Whatever a training loop leaves behind, compared: bit by bit, or as exactly as inductor can.

The eager executor runs the plain model's kernels, so its results are the plain model's, to the bit.
Inductor's kernels round otherwise: what a plan may add to that is nothing, so a planned result has
to be as near to the float64 one as stock inductor's is, and a step that draws random numbers, for
which no float64 run draws the same, has to equal stock inductor's with the same seed.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

from tests.models.steps import same_bits

EXECUTORS: Final = ("eager", pytest.param("inductor", marks=pytest.mark.matrix))
"""Executors the tests of this folder run under; each test names its executor.

Inductor's compilations take seconds to a minute each: the grid of them is asked for.
"""

CANCELLED: Final = 100.0
"""Times :func:`rounded`'s ulps that stock inductor may be off where gradients cancel."""

Outcome = dict[str, Any]
_ERRORS: Final = 2.0  # times the error of stock inductor
_ULPS: Final = 4.0  # of the norm, where stock inductor happens to be exact
_ULPS_OF_ONE: Final = (
    32.0  # of a single number: chance may put stock inductor's next to the true one
)
# Ulps of the norm that other kernels' rounding may add up to in a loop: single, half precision.
_ROUNDED: Final = 512.0, 8.0


def seed_everything(seed: int = 7) -> None:
    """Seed torch's and Python's generators."""
    torch.manual_seed(seed)
    random.seed(seed)


def left_behind(model: nn.Module, **inputs: Tensor) -> Outcome:
    """Copies of parameters, buffers, gradients, inputs and the states of both generators."""
    outcome: Outcome = {"rng": torch.get_rng_state(), "python": random.getstate()}
    named = {**dict(model.named_parameters()), **dict(model.named_buffers()), **inputs}
    for name, tensor in named.items():
        outcome[f"value/{name}"] = tensor.detach().clone()
        outcome[f"gradient/{name}"] = None if tensor.grad is None else tensor.grad.clone()
    return outcome


def differences(wanted: Any, found: Any, *, zero_is_none: bool = False, at: str = "") -> list[str]:
    """Where two outcomes differ, by name; tensors are compared by their bits.

    Args:
        zero_is_none: a gradient of zeros may stand where none is wanted, as AOTAutograd has it for
            parameters whose output got no gradient.
    """
    if isinstance(wanted, Tensor) and isinstance(found, Tensor):
        return [] if same_bits(wanted, found) else [at]
    if wanted is None and isinstance(found, Tensor) and zero_is_none and "gradient" in at:
        return [] if not found.any() else [at]
    parts = _parts(wanted), _parts(found)
    if parts[0] is None or parts[1] is None:
        return [] if type(wanted) is type(found) and wanted == found else [at]
    if type(wanted) is not type(found) or parts[0].keys() != parts[1].keys():
        return [at or "structure"]
    return [
        name
        for key, item in parts[0].items()
        for name in differences(
            item, parts[1][key], zero_is_none=zero_is_none, at=f"{at}/{key}" if at else str(key)
        )
    ]


def inexact(found: Any, stock: Any, exact: Any | None = None, *, at: str = "") -> list[str]:
    """Where ``found`` is further off than stock inductor may be; for executors that round anew.

    Args:
        found: the planned run.
        stock: stock inductor's run, with the same seed.
        exact: the float64 run; None where the step draws random numbers, and ``found`` is compared
            with ``stock`` itself.
    """
    if isinstance(stock, Tensor) and isinstance(found, Tensor):
        return [] if _near(found, stock, exact) else [at]
    parts = _parts(stock), _parts(found)
    if parts[0] is None or parts[1] is None:
        return [] if stock == found else [at]
    if parts[0].keys() != parts[1].keys():
        return [at or "structure"]
    exact_parts = _parts(exact) or {}
    return [
        name
        for key, item in parts[0].items()
        for name in inexact(
            parts[1][key], item, exact_parts.get(key), at=f"{at}/{key}" if at else str(key)
        )
    ]


def rounded(
    wanted: Any, found: Any, *, zero_is_none: bool = False, times: float = 1.0
) -> list[str]:
    """Where two outcomes differ by more than the rounding of a few steps.

    A wrong gradient (a mask drawn again, a buffer read after it was written) is off by thousands of
    times as much.

    Args:
        times: allow so many times as much, for gradients that are small differences of large sums.
    """
    return [
        name
        for name in differences(wanted, found, zero_is_none=zero_is_none)
        if not _is_rounding(_at(wanted, name), _at(found, name), times)
    ]


def _at(outcome: Any, name: str) -> Any:
    """The part of an outcome that :func:`differences` calls by this name."""
    if isinstance(outcome, Mapping):
        for key, item in outcome.items():
            if name == str(key):
                return item
            if name.startswith(f"{key}/"):
                return _at(item, name.removeprefix(f"{key}/"))
        return None
    parts = _parts(outcome)
    return outcome if parts is None else _at(parts, name)


def _is_rounding(wanted: Any, found: Any, times: float) -> bool:
    if isinstance(wanted, float) and isinstance(found, float):
        wanted, found = torch.tensor(wanted), torch.tensor(found)
    if not (isinstance(wanted, Tensor) and isinstance(found, Tensor)):
        return False
    if wanted.dtype != found.dtype or wanted.shape != found.shape:
        return False
    if not wanted.is_floating_point():
        return torch.equal(wanted, found)
    wanted, found = wanted.detach(), found.detach()
    eps = torch.finfo(wanted.dtype).eps
    ulps = _ROUNDED[0 if eps < 1e-5 else 1]
    allowed = times * ulps * eps * max(float(wanted.double().norm()), 1e-2)
    same_nan = torch.equal(wanted.isnan(), found.isnan())
    return same_nan and float((wanted.double() - found.double()).nan_to_num().norm()) <= allowed


def _near(found: Tensor, stock: Tensor, exact: Tensor | None) -> bool:
    if found.dtype != stock.dtype or found.shape != stock.shape:
        return False
    if not found.is_floating_point():
        return torch.equal(found, stock)
    reference = (stock if exact is None else exact).double()
    ulps = _ULPS if found.numel() > 1 else _ULPS_OF_ONE
    allowed = ulps * torch.finfo(found.dtype).eps * reference.norm()
    if exact is not None:
        allowed = torch.maximum(allowed, _ERRORS * (stock.double() - reference).norm())
    same_nan = torch.equal(found.isnan(), stock.isnan())
    return same_nan and bool((found.double() - reference).nan_to_num().norm() <= allowed)


def _parts(item: Any) -> dict[Any, Any] | None:
    """What a container holds, by key; None for what is no container."""
    if isinstance(item, Mapping):
        return dict(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return {part.name: getattr(item, part.name) for part in dataclasses.fields(item)}
    if isinstance(item, Sequence) and not isinstance(item, str | bytes):
        return dict(enumerate(item))
    return None
