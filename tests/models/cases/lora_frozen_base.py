"""LoRA on a frozen base: no input requires grad, most parameters do not either.

Source: huggingface/transformers#42489 (open), #21381, huggingface/peft#137, #1142,
        locuslab/open-unlearning#178 (adapters silently untrained), DeepSpeed PR #8130/#8148.
Hard:   token ids and the embedding output carry no gradient; frozen layers below the first adapter
        need no backward at all, frozen layers between adapters need only dX. Exactly the adapter
        parameters must get a .grad, every frozen one must stay None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECTED = "equal"


class Lora(nn.Module):
    def __init__(self, base: Any, r: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Linear(base.in_features, r, bias=False)
        self.b = nn.Linear(r, base.out_features, bias=False)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        return self.base(x) + 2.0 * self.b(self.a(self.drop(x)))


class Block(nn.Module):
    def __init__(self, d: Any, lora: Any) -> None:
        super().__init__()
        wrap = Lora if lora else (lambda m: m)
        self.q, self.v = wrap(nn.Linear(d, d)), wrap(nn.Linear(d, d))
        self.k, self.o = nn.Linear(d, d), nn.Linear(d, d)
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x: Any) -> Any:
        h = self.n1(x)
        q, k, v = (f(h).unflatten(-1, (2, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        )
        return x + self.down(F.silu(self.up(self.n2(x))))


class Lm(nn.Module):
    def __init__(self, d: int = 8, v: int = 20) -> None:
        super().__init__()
        self.emb = nn.Embedding(v, d)
        self.blocks = nn.ModuleList(Block(d, i > 0) for i in range(3))  # block 0: fully frozen
        self.head = nn.Linear(d, v, bias=False)
        for n, p in self.named_parameters():
            p.requires_grad_(".a." in n or ".b." in n)

    def forward(self, ids: Any) -> Any:
        h = self.emb(ids)
        for b in self.blocks:
            h = b(h)
        return self.head(h)


def _ids(i: Any) -> Any:
    return torch.randint(0, 20, (3, 7), generator=torch.Generator().manual_seed(i))


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Lm().train(), (_ids(0),), lambda o: F.cross_entropy(o.flatten(0, 1), _ids(1).flatten())
