"""Random ops inside the recomputed region: same mask in backward, same RNG state afterwards.

Source: pytorch/pytorch#190758 and #190717 (open: activation_memory_budget < 1 redraws the
        masks in backward, gradients silently wrong), openai/guided-diffusion#167,
        lucidrains/enformer-pytorch#33.
Hard:   several kinds of random draw (native dropout, feature dropout, randn_like, rand, rrelu,
        randint token masking). A budget solver sees cheap element-wise ops and likes to
        recompute them. The global generator must also end where eager leaves it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EXPECTED = "equal"


class Net(nn.Module):
    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.emb = nn.Embedding(32, d)
        self.l1, self.l2, self.l3 = nn.Linear(d, 4 * d), nn.Linear(4 * d, d), nn.Linear(d, 32)
        self.drop = nn.Dropout(0.3)

    def forward(self, ids: Any) -> Any:
        keep = torch.randint(0, 10, ids.shape, device=ids.device) > 1  # BERT-like masking
        h = self.emb(torch.where(keep, ids, torch.zeros_like(ids)))
        h = h + 0.1 * torch.randn_like(h)  # noise injection
        y = self.drop(F.gelu(self.l1(h)))
        y = F.rrelu(y, training=True)
        h = h + F.dropout(self.l2(y), 0.2, True)
        gate = (torch.rand(h.shape[0], 1, 1) < 0.8).to(h) / 0.8  # drop-path
        h = F.dropout1d(h.transpose(1, 2), 0.25, True).transpose(1, 2) * gate
        return self.l3(self.drop(torch.tanh(h)))


def _ids(i: Any) -> Any:
    return torch.randint(0, 32, (4, 9), generator=torch.Generator().manual_seed(i))


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Net().train(), (_ids(0),), lambda o: F.cross_entropy(o.flatten(0, 1), _ids(7).flatten())


def steps(model: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
    opt = torch.optim.SGD(model.parameters(), lr=0.1)
    res = {}
    for i in range(3):
        opt.zero_grad()
        loss = F.cross_entropy(run(_ids(i)).flatten(0, 1), _ids(7).flatten())
        loss.backward()
        opt.step()
        res[f"loss{i}"] = loss.detach()
        res[f"next_draw{i}"] = torch.rand(3)  # sees where the generator stands after backward
    return res
