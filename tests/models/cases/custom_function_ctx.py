"""Custom autograd.Function that keeps tensors on ctx, marks outputs non-differentiable, counts
calls.

Source: bitsandbytes#2034 (tensors on ctx instead of save_for_backward), pytorch/pytorch#117901 and
        #141881 (partitioner saves an fp8 copy of every weight the Function meant to recompute),
        #154820 (in-place in Function reordered across fwd/bwd), torchtune#2456 (CPU tensors saved).
Hard:   the forward and backward of the Function are opaque or get inlined; what it chose NOT to
        save
        must not be saved for it; straight-through rounding; a Function whose backward recomputes a
        quantised weight; an unused needs_input_grad branch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

EXPECTED = "equal"


class RoundSTE(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, step: Any) -> Any:
        ctx.inside = x.abs() <= 4 * step  # tensor kept on ctx
        q = torch.round(x / step).clamp(-4, 4) * step
        code = torch.round(q / step).to(torch.int8)
        ctx.mark_non_differentiable(code)
        return q, code

    @staticmethod
    def backward(ctx: Any, g: Any, _: Any) -> Any:
        return g * ctx.inside, None


class QLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, w: Any) -> Any:
        ctx.save_for_backward(x, w)
        s = w.abs().amax(1, keepdim=True) / 7
        return x @ ((w / s).round() * s).t()

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        x, w = ctx.saved_tensors
        gx = gw = None
        if ctx.needs_input_grad[0]:
            s = w.abs().amax(1, keepdim=True) / 7  # quantised again, not saved
            gx = g @ ((w / s).round() * s)
        if ctx.needs_input_grad[1]:
            gw = g.flatten(0, -2).t() @ x.flatten(0, -2)
        return gx, gw


class Net(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2 * d, d) * 0.4)
        self.w2 = nn.Parameter(torch.randn(d, 2 * d) * 0.4)
        self.w3 = nn.Parameter(torch.randn(d, d), requires_grad=False)
        self.n = nn.LayerNorm(d)

    def forward(self, x: Any) -> Any:
        h, code = RoundSTE.apply(torch.relu(QLinear.apply(self.n(x), self.w1)), 0.5)
        h = QLinear.apply(h, self.w2)
        return x + torch.tanh(QLinear.apply(h, self.w3)), code


def _x(i: Any) -> Any:
    return torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(i))


def build() -> tuple[nn.Module, tuple[Any, ...], Callable[..., Tensor]]:
    torch.manual_seed(0)
    return Net(), (_x(0).requires_grad_(),), lambda o: o[0].square().mean()


def steps(model: nn.Module, run: Callable[..., Any]) -> dict[str, Any]:
    res, opt = {}, torch.optim.SGD([model.w1, model.w2, *model.n.parameters()], lr=0.1)
    for i in range(2):
        opt.zero_grad()
        x = _x(i).requires_grad_(i == 0)  # second time the input needs no gradient
        y, code = run(x)
        loss = y.square().mean()
        loss.backward()
        opt.step()
        res[f"loss{i}"], res[f"code{i}"], res[f"gx{i}"] = loss.detach(), code, x.grad
        res[f"code_rg{i}"] = (code.requires_grad, str(code.dtype))
    return res
