"""Long context, large vocabulary: the logits, not the layers, set the peak.

Source: NVIDIA-NeMo/labs-molt#121 (fp32 chunks kept until backward: 8 GiB), Automodel#3907,
        linkedin/Liger-Kernel#533, NovaSky-AI/SkyRL#1841, EvolvingLMMs-Lab/LongVA#19.
Hard:   layer-wise checkpointing does nothing here. The loss is inside the graph as a Python loop
        over
        chunks with a float upcast; the good plan rebuilds each chunk's logits in backward, which a
        'never recompute matmul' rule forbids. Ignored labels, one all-ignored chunk, z-loss term.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECTED = "equal"

V, T = 257, 24


class Lm(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.emb, self.mix, self.head = (
            nn.Embedding(V, d),
            nn.Linear(d, d),
            nn.Linear(d, V, bias=False),
        )

    def forward(self, ids: Any, labels: Any) -> Any:
        h = self.emb(ids)
        h = (h + F.gelu(self.mix(h))).flatten(0, 1)
        y = labels.flatten()
        tot = h.new_zeros(())
        for hc, yc in zip(h.split(12), y.split(12), strict=False):
            logits = self.head(hc).float()
            tot = tot + F.cross_entropy(logits, yc, ignore_index=-100, reduction="sum")
            tot = tot + 1e-3 * (logits.logsumexp(-1).square() * (yc != -100)).sum()
        return tot / (y != -100).sum().clamp(min=1)


def _b(i: Any) -> Any:
    g = torch.Generator().manual_seed(i)
    ids = torch.randint(0, V, (2, T), generator=g)
    lab = ids.roll(-1, 1)
    lab[0, :12] = -100
    return ids, lab


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Lm(), _b(0), lambda o: o
