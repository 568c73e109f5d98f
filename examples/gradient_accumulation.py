"""Gradient accumulation within a memory budget: several small batches for each update.

    python examples/gradient_accumulation.py --memory-budget 0.3 --accumulate 4

Nothing is special about it: the compiled model is called once for each small batch. Gradients that
are already there take their part of the budget. A fraction moves along with them; a budget in bytes
does not, and the step is planned again when the first of them appear.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import remat
from remat.solvers.units import format_bytes


class Classifier(nn.Module):
    """A residual network of fully connected blocks."""

    def __init__(self, hidden: int, blocks: int, classes: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(hidden), nn.Linear(hidden, 4 * hidden), nn.GELU(),
                nn.Linear(4 * hidden, hidden),
            )
            for _ in range(blocks)
        )  # fmt: skip
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), labels)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print losses and the peak of a whole update."""
    arguments = parse(argv)
    torch.manual_seed(0)
    model = Classifier(arguments.hidden, arguments.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    step = remat.compile(
        model,
        memory_budget=arguments.memory_budget,
        optimizer=optimizer,
        executor=arguments.executor,
        time_limit=arguments.time_limit,
    )

    # Put your data here. Batches of one size are one plan.
    size = (arguments.batch, arguments.hidden)
    data = [(torch.randn(size), torch.randint(10, size[:1])) for _ in range(arguments.accumulate)]

    def update() -> float:
        optimizer.zero_grad()
        total = 0.0
        for x, labels in data:
            loss = step(x, labels) / arguments.accumulate
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    for _ in range(arguments.steps):
        print(f"loss {update():.4f}")

    plan = step.plans[0]  # that of the last call, when all gradients were there
    measured = remat.measure(update, resident=(model, optimizer, data))
    print(
        f"\nplanned   {format_bytes(plan.peak)} (without remat {format_bytes(plan.baseline_peak)})"
    )
    print(f"measured  {measured}")
    print("the measured step has optimizer.step() in it, which is not in the plan")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory-budget", type=budget, default=0.3)
    parser.add_argument("--accumulate", type=int, default=4, help="batches for each update")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--executor", choices=("eager", "inductor"), default=None)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for the solver")
    return parser.parse_args(argv)


def budget(text: str) -> str | float:
    """``0.3`` is a fraction, ``2GiB`` are bytes."""
    return float(text) if re.fullmatch(r"[01]?\.\d*", text) else text


if __name__ == "__main__":
    main()
