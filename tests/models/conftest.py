"""Makes ``tests.models`` and ``benchmarks`` importable whichever way pytest was started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_ROOT = str(Path(__file__).parents[2])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)


@pytest.fixture(autouse=True)
def _one_thread_and_a_fresh_compiler() -> Iterator[None]:
    # Small ops gain nothing from threads, and on a busy machine lose tenfold by waiting for them.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)
