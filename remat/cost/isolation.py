"""Running real ops while a graph is being traced."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def outside_modes(function: Callable[[], T], device: torch.device) -> T:
    """Call ``function`` where no mode is active, and leave no trace of the call.

    Cost models are asked while AOTAutograd traces: fake tensors, functionalization, proxies,
    autocast and a profiler may all be active. Each of them belongs to a thread, so a fresh thread
    has none of them, whatever this or a later torch calls them. The generators of random numbers,
    which are shared, are put back. Garbage is not collected meanwhile, for its release would be
    taken for the op's.
    """

    def work() -> T:
        # A new thread has OpenMP's own number of threads until torch is asked for it, and what
        # libraries allocate (oneDNN's scratchpads) grows with the number.
        torch.get_num_threads()
        with _random_state_kept(device), _no_collection(), warnings.catch_warnings():
            # Made-up data provokes warnings that are not the user's; where warnings are errors
            # they would make an op look as if it could not be run.
            warnings.simplefilter("ignore")
            with torch.no_grad():
                return function()

    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="remat-cost") as executor:
        return executor.submit(work).result()


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    host = torch.get_rng_state()
    if device.type != "cuda":
        try:
            yield
        finally:
            torch.set_rng_state(host)
        return
    with torch.cuda.device(device):
        state = torch.cuda.get_rng_state(device)
        try:
            yield
        finally:
            torch.cuda.set_rng_state(state, device)
            torch.set_rng_state(host)


@contextmanager
def _no_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
