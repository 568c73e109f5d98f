"""Ragged batches with gradient accumulation: the shape changes at every micro-step.

Source: pytorch/pytorch#105279, unslothai/unsloth-zoo#1146 and PR #1001 (recompile limit hit inside
        a recompute), NVIDIA-NeMo/Automodel PR #2634 (variable-length batches spike past the limit).
Hard:   the plan is made for one shape but bytes scale with the next; automatic dynamic shapes give
        symbolic sizes to the solver; sizes 0 and 1 specialise; the last micro-batch is smaller; the
        recompile limit must not turn into an error; gradients accumulate across plans.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECTED = "equal"

SHAPES = [(2, 7), (2, 12), (3, 5), (1, 9), (4, 1), (3, 16), (2, 7), (5, 11), (1, 1), (2, 13)]


class Net(nn.Module):
    def __init__(self, width: int = 8, vocabulary: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(32, width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        batch, length = tokens.shape
        h = self.embed(tokens) + self.position(torch.arange(length))
        q, k, v = self.qkv(self.norm(h)).view(batch, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        bias = torch.zeros(batch, 1, 1, length).masked_fill(~mask[:, None, None], -1e9)
        attended = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        h = h + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        h = h + self.down(F.gelu(self.up(self.norm(h))))
        return F.linear(h, self.embed.weight)


def _batch(batch: int, length: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(batch * 100 + length)
    tokens = torch.randint(0, 16, (batch, length), generator=generator)
    lengths = torch.randint(1, length + 1, (batch, 1), generator=generator)
    return tokens, torch.arange(length)[None] < lengths


def _loss(logits: Tensor, tokens: Tensor, mask: Tensor) -> Tensor:
    return F.cross_entropy(logits[mask], tokens[mask])


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    tokens, mask = _batch(2, 7)
    return Net(), (tokens, mask), lambda logits: _loss(logits, tokens, mask)


def steps(model: Any, run: Any) -> dict[str, Any]:
    left: dict[str, Any] = {}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for index, (batch, length) in enumerate(SHAPES):
        tokens, mask = _batch(batch, length)
        loss = _loss(run(tokens, mask), tokens, mask) / 5
        loss.backward()
        left[f"loss{index}"] = loss.detach()
        if index % 5 == 4:
            optimizer.step()
            optimizer.zero_grad()
    tokens, mask = _batch(3, 6)
    _loss(run(tokens, mask), tokens, mask).backward()
    return left
