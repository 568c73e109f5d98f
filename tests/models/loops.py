"""One training loop run twice, with the plain model and with the planned one, and compared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config

import remat
from tests.models.compare import (
    CANCELLED,
    Outcome,
    differences,
    inexact,
    left_behind,
    rounded,
    seed_everything,
)

Run = Callable[..., Any]
Body = Callable[[nn.Module, Run, Outcome], None]
WIDTH = 8


class Residual(nn.Module):
    """Blocks of a norm, a linear map, tanh and dropout; what most loops here train."""

    def __init__(self, blocks: int = 2, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(blocks))
        self.norm, self.drop = nn.LayerNorm(WIDTH), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + self.drop(torch.tanh(layer(self.norm(x))))
        return x


def batch(seed: int, *shape: int) -> Tensor:
    """Random numbers that depend on nothing but the seed and the shape."""
    return torch.randn(*(shape or (6, WIDTH)), generator=torch.Generator().manual_seed(seed))


def planned(model: Any, executor: str, memory_budget: float | None = 0.0, **options: Any) -> Any:
    """``remat.compile`` as these tests use it: quick, and silent about what is not planned."""
    given = {"cost": "flops", "time_limit": 0.1, "on_unplanned": "ignore", **options}
    return remat.compile(model, memory_budget=memory_budget, executor=executor, **given)


def aot_eager(model: Any) -> Any:
    """torch's own graphs, run op by op."""
    return torch.compile(model, backend="aot_eager", dynamic=False)


def trained(build: Callable[[], nn.Module], body: Body, prepare: Run) -> tuple[Outcome, Any]:
    """What ``body`` sees and leaves behind on a fresh model, run as ``prepare(model)``."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build()
    run = prepare(model)
    seed_everything()
    outcome: Outcome = {}
    body(model, run, outcome)
    return {**outcome, **left_behind(model)}, run


def trained_by_stock(build: Callable[[], nn.Module], body: Body) -> Outcome:
    """The same under torch's own graphs, without the donated buffers that forbid retain_graph."""
    with functorch_config.patch(donated_buffer=False):
        return trained(build, body, aot_eager)[0]


def check(
    build: Callable[[], nn.Module],
    body: Body,
    executor: str,
    *,
    zero_is_none: bool = False,
    stock: bool = False,
    exact: Body | None = None,
    **options: Any,
) -> Any:
    """Hold the loop under a plan to the loop without one; returns the planned callable.

    Args:
        body: trains ``model`` by calling ``run``, and notes in ``outcome`` what it sees.
        zero_is_none: see :func:`tests.models.compare.differences`.
        stock: hold it to torch's own compiled graphs instead, where those already differ from the
            plain model (say, by the order in which gradients are added up).
        exact: the loop in single precision, for one in half precision: inductor's kernels round
            less often than the plain model's, and are measured by how far they are from this.
    """
    if executor == "inductor" and exact is not None:
        assert not stock, "half precision is held to stock inductor anyway"
        assert not zero_is_none
        return check_halved(build, body, exact, **options)
    if executor == "inductor":
        return check_inductor(build, body, zero_is_none=zero_is_none, **options)
    if stock:
        wanted = trained_by_stock(build, body)
    else:
        wanted, _ = trained(build, body, lambda model: model)
    found, run = trained(build, body, lambda model: planned(model, executor, **options))
    assert differences(wanted, found, zero_is_none=zero_is_none) == []
    return run


def check_inductor(
    build: Callable[[], nn.Module], body: Body, *, zero_is_none: bool = False, **options: Any
) -> Any:
    """The same with inductor's kernels: held to the plain model, or else to stock inductor.

    To stock inductor where the loop draws random numbers, which are not the plain model's, and
    where its kernels too are off by more than a few roundings.
    """
    wanted, _ = trained(build, body, lambda model: model)
    found, run = trained(build, body, lambda model: planned(model, "inductor", **options))
    wrong = rounded(wanted, found, zero_is_none=zero_is_none)
    if wrong:
        stock = trained_by_inductor(build, body)
        if not draws(build, body):
            assert rounded(wanted, stock, zero_is_none=zero_is_none, times=CANCELLED) == [], wrong
        assert rounded(stock, found) == []
    return run


def check_halved(build: Callable[[], nn.Module], body: Body, exact: Body, **options: Any) -> Any:
    """Hold a planned loop in half precision to twice stock inductor's error, with torch's draws."""
    wanted, _ = trained(build, exact, lambda model: model)
    stock = trained_by_inductor(build, body, options={"fallback_random": True})
    options["inductor"] = {**options.get("inductor", {}), "fallback_random": True}
    found, run = trained(build, body, lambda model: planned(model, "inductor", **options))
    assert inexact(found, stock, wanted) == []
    return run


def draws(build: Callable[[], nn.Module], body: Body) -> bool:
    """Whether the plain model's loop leaves another state of the generator than it found."""
    left, _ = trained(build, body, lambda model: model)
    seed_everything()
    return not torch.equal(left["rng"], torch.get_rng_state())


def trained_by_inductor(
    build: Callable[[], nn.Module],
    body: Body,
    then: Run | None = None,
    options: dict[str, Any] | None = None,
) -> Outcome:
    """The loop under stock inductor, without the donated buffers that forbid retain_graph.

    Args:
        then: a function of what the model returns, compiled with it.
    """

    def prepare(model: nn.Module) -> Run:
        whole = model if then is None else lambda x: then(model(x))
        return torch.compile(whole, dynamic=False, options=options)

    with functorch_config.patch(donated_buffer=False):
        return trained(build, body, prepare)[0]
