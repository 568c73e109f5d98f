"""The two models of the CUDA check, written out: nothing is fetched, no other package needed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Shape:
    """Of a language model and its batch."""

    vocabulary: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    batch: int
    length: int
    llama: bool

    @property
    def tokens(self) -> int:
        """Of one step."""
        return self.batch * self.length


SHAPES: Final = {
    "gpt2-124m": Shape(50304, 768, 12, 12, 12, 3072, 16, 1024, llama=False),
    "llama-1b": Shape(128256, 2048, 16, 32, 8, 8192, 4, 2048, llama=True),
}


def tiny(shape: Shape) -> Shape:
    """The same in small, for a CPU."""
    return replace(
        shape, vocabulary=128, hidden=64, layers=2, heads=4, kv_heads=min(shape.kv_heads, 2),
        inner=128, batch=2, length=64,
    )  # fmt: skip


class Block(nn.Module):
    """Pre-norm attention and MLP; rotary positions, grouped heads and a gate for Llama."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        head = shape.hidden // shape.heads
        norm = nn.RMSNorm if shape.llama else nn.LayerNorm
        bias = not shape.llama
        self.norm1, self.norm2 = norm(shape.hidden), norm(shape.hidden)
        self.q = nn.Linear(shape.hidden, shape.hidden, bias=bias)
        self.kv = nn.Linear(shape.hidden, 2 * shape.kv_heads * head, bias=bias)
        self.out = nn.Linear(shape.hidden, shape.hidden, bias=bias)
        self.up = nn.Linear(shape.hidden, shape.inner, bias=bias)
        self.gate = nn.Linear(shape.hidden, shape.inner, bias=bias) if shape.llama else None
        self.down = nn.Linear(shape.inner, shape.hidden, bias=bias)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.out(self._attend(self.norm1(x), cos, sin))
        h = self.norm2(x)
        inner = F.gelu(self.up(h)) if self.gate is None else F.silu(self.gate(h)) * self.up(h)
        return x + self.down(inner)

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, self.shape.heads, -1).transpose(1, 2)
        k, v = self.kv(x).view(batch, length, 2, self.shape.kv_heads, -1).permute(2, 0, 3, 1, 4)
        if self.shape.llama:
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        grouped = self.shape.heads != self.shape.kv_heads
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return h.transpose(1, 2).flatten(2)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class LanguageModel(nn.Module):
    """Tokens and labels in, the loss out.

    Attributes:
        checkpointed: ``torch.utils.checkpoint`` on every layer.
    """

    def __init__(self, shape: Shape, checkpointed: bool = False) -> None:
        super().__init__()
        self.shape, self.checkpointed = shape, checkpointed
        self.embedding = nn.Embedding(shape.vocabulary, shape.hidden)
        self.position = None if shape.llama else nn.Embedding(shape.length, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = (nn.RMSNorm if shape.llama else nn.LayerNorm)(shape.hidden)
        head = shape.hidden // shape.heads
        angles = torch.outer(
            torch.arange(shape.length), 10000.0 ** (-torch.arange(0, head, 2) / head)
        )
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(tokens)
        if self.position is not None:
            x = x + self.position.weight
        for layer in self.layers:
            if self.checkpointed:
                x = checkpoint(layer, x, self.cos, self.sin, use_reentrant=False)
            else:
                x = layer(x, self.cos, self.sin)
        logits = F.linear(self.norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


Batch = tuple[Tensor, Tensor]


def build(
    name: str, device: str, *, small: bool = False, checkpointed: bool = False
) -> tuple[LanguageModel, Batch]:
    """The model in bfloat16, the same every time, and a batch."""
    shape = tiny(SHAPES[name]) if small else SHAPES[name]
    torch.manual_seed(0)
    with torch.device(device):
        model = LanguageModel(shape, checkpointed).to(torch.bfloat16)
        tokens = torch.randint(shape.vocabulary, (shape.batch, shape.length + 1))
    return model, (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def relative_error(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> float:
    """The largest, over parameters, of |ours - theirs| / |theirs|; 0.0 if all bits are equal."""
    worst = 0.0
    for a, b in zip(ours, theirs, strict=True):
        b = b.to(a.device)
        if not torch.equal(a, b):
            difference = (a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-12)
            worst = max(worst, float(difference), 1e-12)
    return worst
