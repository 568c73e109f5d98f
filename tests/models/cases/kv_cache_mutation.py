"""The forward appends to a Python-side KV cache that a later forward reads, with gradient.

Source: huggingface/transformers#28056 ('use_cache=True is incompatible with gradient
        checkpointing'), #30301/PR #30320, shihao1895/MemoryVLA#18 (sequence doubled in recompute),
        NVlabs/LongLive#16, transformers PR #46572, unslothai/unsloth-zoo#813 (silent wrong K/V
        grads).
Hard:   replaying the Python code appends a second time (length 286 -> 572). The cache is a dict of
        lists owned by the caller; chunk 2 attends to chunk 1's live K/V, so gradient must flow back
        through the cache, and after backward the cache must hold each chunk once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECTED = "equal"


class Attn(nn.Module):
    def __init__(self, d: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(d, 3 * d) for _ in range(layers))
        self.out = nn.ModuleList(nn.Linear(d, d) for _ in range(layers))

    def forward(self, x: Any, cache: Any) -> Any:
        for i, (f, o) in enumerate(zip(self.qkv, self.out, strict=False)):
            q, k, v = f(x).chunk(3, -1)
            if i in cache:
                k, v = torch.cat([cache[i][0], k], 1), torch.cat([cache[i][1], v], 1)
            cache[i] = [k, v]
            x = x + o(F.scaled_dot_product_attention(q, k, v))
        return x


def _x(i: Any, t: Any) -> Any:
    return torch.randn(2, t, 8, generator=torch.Generator().manual_seed(i))


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Attn(), (_x(0, 4), {}), lambda o: o.square().mean()


def steps(model: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
    res, opt = {}, torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(2):
        opt.zero_grad()
        cache = {}
        a = run(_x(i, 4), cache)
        b = run(_x(i + 5, 3), cache)
        loss = a.square().mean() + b.sin().mean()
        loss.backward()
        res[f"len{i}"] = [cache[j][0].shape[1] for j in sorted(cache)]
        res[f"k{i}"], res[f"loss{i}"] = cache[1][0].detach(), loss.detach()
        opt.step()
    return res
