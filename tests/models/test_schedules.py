"""The graphs of every case, split by random schedules for either executor, and run op by op."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.models.beyond import BATCH, WIDTH, Sandwich
from tests.models.replay import record
from tests.models.test_cases import CASES, load
from tests.models.test_ops_beyond import PLANNED
from tests.passes.plans import random_schedule

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]
SCHEDULES = 8
QUICK = ("buffer_read_then_mutate", "dropout_noise_rng", "inplace_views", "kv_cache_mutation")


def check_schedules(function: Callable[..., Any], args: Any, executor: str) -> None:
    for recorded in record(function, *args, executor=executor):
        for seed in range(SCHEDULES):
            rng = random.Random(seed)
            keep, forget = rng.choice((0.0, 0.3, 0.7)), rng.choice((0.0, 0.5, 1.0))
            problem = recorded.lowered.problem
            recorded.check(random_schedule(problem, rng, keep=keep, forget=forget))


def _marked(name: str) -> Any:
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.matrix)


@pytest.mark.parametrize("executor", ["eager", "inductor"])
@pytest.mark.parametrize("name", [_marked(name) for name in CASES])
def test_a_case_under_random_schedules(name: str, executor: str) -> None:
    model, args, _ = load(name).build()
    check_schedules(model, args, executor)


@pytest.mark.matrix
@pytest.mark.parametrize("name", PLANNED)
def test_ops_beyond_the_tables_under_random_schedules(name: str) -> None:
    torch.manual_seed(3)
    model = Sandwich(PLANNED[name][0]())
    check_schedules(model, (torch.randn(BATCH, WIDTH),), "inductor")
