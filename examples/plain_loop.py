"""A plain training loop within a memory budget.

    python examples/plain_loop.py --memory-budget 0.3

``remat.compile`` is the only line that a loop without a budget does not have. The budget is the
peak of forward and backward, parameters and batch included: "2GiB", "80%" of the device, or a float
between 0.0, the least there is, and 1.0, no saving.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import remat
from remat.solvers.units import format_bytes


class LanguageModel(nn.Module):
    """A small transformer that returns its loss, so that the loss is planned too."""

    def __init__(self, vocabulary: int, layers: int, hidden: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                hidden, 4, 4 * hidden, dropout=0.1, activation="gelu", batch_first=True,
                norm_first=True,
            )
            for _ in range(layers)
        )  # fmt: skip
        self.head = nn.Linear(hidden, vocabulary)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def batches(arguments: argparse.Namespace) -> DataLoader[tuple[Tensor, ...]]:
    """Tokens and labels; put your data here."""
    shape = (arguments.steps * arguments.batch, arguments.sequence + 1)
    tokens = torch.randint(arguments.vocabulary, shape)
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return DataLoader(data, batch_size=arguments.batch, shuffle=True, drop_last=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Train, and print losses, the plan, and the peak that was measured."""
    arguments = parse(argv)
    torch.manual_seed(0)
    model = LanguageModel(arguments.vocabulary, arguments.layers, arguments.hidden)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=arguments.steps)

    step = remat.compile(
        model,
        memory_budget=arguments.memory_budget,
        optimizer=optimizer,  # its state is in the budget, too
        executor=arguments.executor,
        time_limit=arguments.time_limit,
    )

    def forward_and_backward() -> Tensor:
        optimizer.zero_grad()
        loss = step(tokens, labels)
        loss.backward()
        return loss.detach()

    for tokens, labels in batches(arguments):  # noqa: B007  the function above reads them
        loss = forward_and_backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        print(f"loss {loss.item():.4f}")

    plan = step.plans[0]
    print(f"\n{plan}\n")
    measured = remat.measure(forward_and_backward, resident=(model, optimizer, tokens, labels))
    print(f"measured: {measured}")
    print(f"without remat it would have been {format_bytes(plan.baseline_peak)}")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory-budget", type=budget, default=0.3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=1024)
    parser.add_argument("--executor", choices=("eager", "inductor"), default=None)
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for the solver")
    return parser.parse_args(argv)


def budget(text: str) -> str | float:
    """``0.3`` is a fraction, ``2GiB`` are bytes."""
    return float(text) if re.fullmatch(r"[01]?\.\d*", text) else text


if __name__ == "__main__":
    main()
