"""What a step reads or moves in Python, however deep: told apart from outside, refused from inside.

Each step is called four times and held to the plain function; a plan may refuse, never differ.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import remat
from remat.solvers.errors import CaptureError
from remat.step_contents import contents

Step = Callable[..., Any]


@dataclasses.dataclass(slots=True)
class Slotted:
    n: int = 0


class Log:
    def __init__(self) -> None:
        self.values: list[float] = []

    def append(self, value: float) -> None:
        self.values.append(value)


class Warm:
    n = 0

    def __call__(self) -> int:
        self.n += 1
        return self.n


class Config:
    n = 0


class Trainer:
    """What the steps below train; ``by`` is a number, part of the graph."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model: Any = nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        Config.n = 0

    def train(self, by: Any = 1.0) -> Tensor:
        self.optimizer.zero_grad()
        loss = (self.model(torch.ones(4, 3)) * by).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss


def default_argument(t: Trainer) -> Step:
    def step(given: Any = SimpleNamespace(n=0)) -> Any:  # noqa: B008
        given.n += 1
        return t.train(given.n)

    return step


def object_argument(t: Trainer) -> tuple[Step, Any]:
    def step(given: Any) -> Any:
        given.n += 1
        return t.train(given.n)

    return step, SimpleNamespace(n=0)


def filled_argument(t: Trainer) -> tuple[Step, Any]:
    def step(given: Any) -> Any:
        given["loss"] = t.train()

    return step, {}


def callable_object(t: Trainer) -> Step:
    warm = Warm()
    return lambda: t.train(warm())


def function_attribute(t: Trainer) -> Step:
    def step() -> Any:
        step.calls += 1  # type: ignore[attr-defined]
        return t.train(step.calls)  # type: ignore[attr-defined]

    step.calls = 0  # type: ignore[attr-defined]
    return step


def generator_of_python(t: Trainer) -> Step:
    rng = random.Random(0)
    return lambda: t.train(rng.random())


def generator_of_numpy(t: Trainer) -> Step:
    rng = np.random.default_rng(0)
    return lambda: t.train(float(rng.random()))


def seeded_default(t: Trainer) -> Step:
    def step() -> Any:
        torch.default_generator.manual_seed(0)
        return t.train(torch.rand(1))

    return step


def rate_bound_anew(t: Trainer) -> Step:
    t.optimizer.param_groups[0]["lr"] = torch.tensor(0.1)

    def step() -> Any:
        loss = t.train()
        group = t.optimizer.param_groups[0]
        group["lr"] = group["lr"] * 0.5
        return loss

    return step


def counting_optimizer(t: Trainer) -> Step:
    class Counting(torch.optim.SGD):
        k = 1

        def step(self, closure: Any = None) -> Any:
            self.k += 1
            return super().step(closure)

    t.optimizer = Counting(t.model.parameters(), lr=0.1)
    return lambda: t.train(t.optimizer.k)


def state_of_its_own(t: Trainer) -> Step:
    t.optimizer.state["steps"] = 1
    return t.train


def dropped_state(t: Trainer) -> Step:
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1, momentum=0.9)

    def step() -> Any:
        loss = t.train()
        t.optimizer.state.clear()
        return loss

    return step


def iterator(t: Trainer) -> Step:
    counter = itertools.count(1)
    return lambda: t.train(next(counter))


def generator_function(t: Trainer) -> Step:
    numbers = (n + 1 for n in range(9))
    return lambda: t.train(next(numbers))


def array(t: Trainer) -> Step:
    counts = np.zeros(1)

    def step() -> Any:
        counts[0] += 1
        return t.train(float(counts[0]))

    return step


def slots(t: Trainer) -> Step:
    meter = Slotted()

    def step() -> Any:
        meter.n += 1
        return t.train(meter.n)

    return step


def nested_object(t: Trainer) -> Step:
    outer = SimpleNamespace(meter=SimpleNamespace(n=0))

    def step() -> Any:
        outer.meter.n += 1
        return t.train(outer.meter.n)

    return step


def list_in_an_object(t: Trainer) -> Step:
    log = Log()

    def step() -> Any:
        log.append(1.0)
        return t.train(len(log.values))

    return step


def object_of_a_module(t: Trainer) -> Step:
    class Metered(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.meter.n += 1
            return super().forward(x) * self.meter.n

    t.model = Metered(3, 1)
    t.model.meter = SimpleNamespace(n=0)
    t.optimizer = torch.optim.SGD(t.model.parameters(), lr=0.1)
    return t.train


def class_attribute(t: Trainer) -> Step:
    def step() -> Any:
        Config.n += 1
        return t.train(Config.n)

    return step


def alternating(t: Trainer) -> Step:
    t.model.phase = {"p": 0, "x": object()}

    def step() -> Any:
        t.model.phase["p"] ^= 1
        return t.train(1.0 + t.model.phase["p"])

    return step


def alternating_betas(t: Trainer) -> Step:
    t.optimizer = torch.optim.Adam(t.model.parameters(), lr=0.1)

    def step() -> Any:
        group = t.optimizer.param_groups[0]
        group["betas"] = (0.5, 0.9) if group["betas"][0] != 0.5 else (0.9, 0.99)
        return t.train()

    return step


def counter(t: Trainer) -> Step:
    seen: collections.Counter[str] = collections.Counter()

    def step() -> Any:
        seen["n"] += 1
        return t.train(seen["n"])

    return step


def text(t: Trainer) -> Step:
    return lambda: {"message": f"{t.train().item()}"}


def another_group(t: Trainer) -> Step:
    def step() -> Any:
        loss = t.train()
        t.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
        return loss

    return step


def another_module(t: Trainer) -> Step:
    def step() -> Any:
        t.model.head = nn.Linear(1, 1)
        return t.train()

    return step


def gradients_off(t: Trainer) -> Step:
    def step() -> Any:
        loss = t.train()
        torch.set_grad_enabled(False)
        return loss

    return step


MOVING = (
    default_argument, object_argument, filled_argument, callable_object, function_attribute,
    generator_of_python,
    generator_of_numpy, seeded_default, rate_bound_anew, counting_optimizer, state_of_its_own,
    dropped_state, iterator, generator_function, array, slots, nested_object, list_in_an_object,
    object_of_a_module, class_attribute, alternating, alternating_betas, counter, text,
    another_group, another_module, gradients_off,
)  # fmt: skip


REFUSED = re.compile(
    "changes .* in Python|changes a container|seeds a random generator|leaves another tensor|"
    "state of its own|drops state|a text with a number|gradients switched|comes different again"
)


def compiled(step: Step, trainer: Trainer) -> Step:
    return remat.compile_step(step, state=(trainer.model, trainer.optimizer), cost="roofline")


@pytest.mark.parametrize("make", MOVING)
def test_what_a_step_moves_in_python_is_refused_or_moved(make: Callable[[Trainer], Any]) -> None:
    def run(planned: bool) -> tuple[list[Any], Exception | None]:
        trainer = Trainer()
        made = make(trainer)
        step, *given = made if isinstance(made, tuple) else (made,)
        if planned:
            step = compiled(step, trainer)
        torch.manual_seed(3)
        seen: list[Any] = []
        try:
            for _ in range(4):
                step(*given)
                torch.set_grad_enabled(True)
                seen.append([p.detach().clone() for p in trainer.model.parameters()])
        except CaptureError as error:
            return seen, error
        finally:
            torch.set_grad_enabled(True)
        return seen, None

    plain, _ = run(False)
    planned, error = run(True)
    assert error is not None or len(planned) == 4
    assert error is None or REFUSED.search(str(error))
    torch.testing.assert_close(planned, plain[: len(planned)], rtol=0, atol=0)


def outside(name: str) -> tuple[Any, Callable[[int], None]]:
    """Something a step multiplies by, and how it is changed from outside."""
    held = SimpleNamespace(alpha=1.0, array=np.ones(1), nested=SimpleNamespace(alpha=1.0))
    held.mixed = {"scale": 1.0, "x": object()}
    if name == "attribute":
        return (lambda: held.alpha), lambda n: setattr(held, "alpha", float(n))
    if name == "nested":
        return (lambda: held.nested.alpha), lambda n: setattr(held.nested, "alpha", float(n))
    if name == "array":
        return (lambda: float(held.array[0])), lambda n: held.array.fill(n)
    if name == "numpy":
        return (lambda: held.alpha * 1), lambda n: setattr(held, "alpha", np.float32(n))
    if name == "mixed":
        return (lambda: held.mixed["scale"]), lambda n: held.mixed.update(scale=float(n))
    return (lambda: Config.n + 1), lambda n: setattr(Config, "n", n)


@pytest.mark.parametrize("name", ["attribute", "nested", "array", "numpy", "mixed", "class"])
def test_what_changes_from_outside_makes_another_graph(name: str) -> None:
    def run(planned: bool) -> list[Tensor]:
        trainer = Trainer()
        read, change = outside(name)

        def step() -> Tensor:
            return trainer.train(read())

        run_step = compiled(step, trainer) if planned else step
        seen = []
        for n in (1, 2, 2, 3):
            change(n)
            run_step()
            seen.append(trainer.model.weight.detach().clone())
        return seen

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


def test_the_walk_is_bounded_and_asks_only_for_what_is_mentioned() -> None:
    held: Any = SimpleNamespace(n=1, other=2, long=list(range(10_000)))
    held.itself = held
    names = frozenset({"n", "long", "itself"})
    assert contents(held, names)[1:] == [(".long", ("list", 10_000)), (".n", ("int", "1"))]
    assert contents(torch.ones(1), names) == []
    assert contents(random.Random(0), names) == []
    assert len(contents(random.Random(0), names, moving=True)) == 1
