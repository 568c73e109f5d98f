"""What emitted graphs call while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from remat.solvers.errors import RematError


def random_state(device: torch.device) -> torch.Tensor:
    """The state of the device's default generator, to be replayed later.

    Raises:
        RematError: the device is neither cpu nor cuda.
    """
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    if device.type == "cpu":
        return torch.get_rng_state()
    # The CPU's state would replay another mask there, and nobody would notice.
    raise RematError(
        f"cannot replay random numbers of device {str(device)!r}: only those of cpu and cuda"
    )


def replay_random(
    state: torch.Tensor, device: torch.device, op: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Run a random op as it ran when ``state`` was taken; the generator is left where it was."""
    before = random_state(device)
    _set_random_state(state, device)
    try:
        return op(*args, **kwargs)
    finally:
        _set_random_state(before, device)


def random_state_bytes(device: torch.device) -> int:
    """Bytes of what :func:`random_state` returns."""
    return 16 if device.type == "cuda" else random_state(device).numel()


def _set_random_state(state: torch.Tensor, device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
