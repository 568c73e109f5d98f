"""Makes ``tests.models`` and ``benchmarks`` importable whichever way pytest was started."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

_ROOT = str(Path(__file__).parents[2])
if _ROOT not in sys.path:
    sys.path.insert(0, _ROOT)

# What inductor generates stays out of the user's cache.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", tempfile.mkdtemp(prefix="remat-inductor-"))


@pytest.fixture(autouse=True)
def _one_thread_and_a_fresh_compiler() -> Iterator[None]:
    # Small ops gain nothing from threads, and on a busy machine lose tenfold by waiting for them.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What torch itself warns of while inductor compiles."""
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        if parameters.get("executor") == "inductor":
            for kind in ("DeprecationWarning", "FutureWarning", "UserWarning:torch._inductor"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore::{kind}"))
