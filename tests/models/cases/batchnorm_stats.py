"""BatchNorm statistics must move once per step, not twice.

Source: pytorch/pytorch#96136 (open), discuss.pytorch.org/t/17738, fairscale#1035,
        Tencent/YOLO-Master#262, m2lines/Samudra#572.
Hard:   the forward mutates buffers (running_mean/var, num_batches_tracked); a recompute that
        replays the op moves them a second time. Loss and gradients still match, so only a buffer
        comparison sees it. Nested: InstanceNorm with running stats. A switch to eval and back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

EXPECTED = "equal"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1, self.b1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.c2, self.b2 = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8, momentum=0.3)
        self.c3 = nn.Conv2d(8, 8, 3, padding=1)
        self.n3 = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
        self.b4 = nn.BatchNorm1d(8, affine=False)
        self.fc = nn.Linear(8, 5)

    def forward(self, x: Any) -> Any:
        x = torch.relu(self.b1(self.c1(x)))
        x = x + torch.relu(self.b2(self.c2(x)))
        x = torch.relu(self.n3(self.c3(x)))
        return self.fc(self.b4(x.mean((2, 3))))


def _x(i: Any) -> Any:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(100 + i)) * (1 + i)


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Net().train(), (_x(0),), lambda out: out.square().mean()


def steps(model: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
    res, opt = {}, torch.optim.SGD(model.parameters(), lr=0.05)
    for i in range(4):
        if i == 2:
            model.eval()
            with torch.no_grad():
                res["eval"] = run(_x(9))
            model.train()
        opt.zero_grad()
        loss = run(_x(i)).square().mean()
        loss.backward()
        opt.step()
        res[f"loss{i}"] = loss.detach()
    return res
