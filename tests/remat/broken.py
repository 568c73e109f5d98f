"""A model that is captured as two graphs, and what its steps leave behind."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Broken(nn.Module):
    """Blocks, with a graph break after the first two."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[1](self.blocks[0](x))
        torch._dynamo.graph_break()
        return self.blocks[3](self.blocks[2](x)).square().mean()


def gradients(model: nn.Module, step: Callable[[], object]) -> list[Tensor]:
    model.zero_grad(set_to_none=True)
    step()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]
