"""What all tests share: markers that skip themselves, and property tests without a clock."""

from __future__ import annotations

import gc
import os
import tempfile

import pytest
from hypothesis import settings

# A shared machine stalls now and then: a property is no less true for having taken a second.
settings.register_profile("remat", deadline=None)
settings.load_profile("remat")


# What is measured here must neither come from, nor go into, the user's own cache.
# Compiling takes a minute a step: tests of inductor say executor="inductor".
os.environ["REMAT_EXECUTOR"] = "eager"
os.environ["REMAT_CACHE_DIR"] = tempfile.mkdtemp(prefix="remat-tests-")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a CUDA device where there is none; torch is imported only to find out."""
    wanting = [item for item in items if item.get_closest_marker("cuda")]
    if not wanting:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in wanting:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """What was imported is no garbage, and torch collects after each compilation."""
    gc.collect()
    gc.freeze()
