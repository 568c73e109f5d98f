"""Layers whose ops stand in no table: custom ops, higher-order ops, subclasses; one class each.

Every layer maps a batch of WIDTH features to itself, and stands between two ordinary ones.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils.checkpoint import checkpoint

WIDTH = 16
BATCH = 32
Function = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    """A function of one tensor as a module."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Sandwich(nn.Module):
    """The layer between two that have something to recompute; forward returns the loss."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)
        )
        self.middle = middle
        self.last = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self.first(x))).square().mean()


@torch.library.custom_op("remat_beyond::twice", mutates_args=())
def twice(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("remat_beyond::sine", mutates_args=())
def sine(x: Tensor) -> Tensor:
    return x.sin()


@torch.library.custom_op("remat_beyond::sine_backward", mutates_args=())
def sine_backward(gradient: Tensor, x: Tensor) -> Tensor:
    return gradient * x.cos()


sine.register_autograd(
    lambda ctx, gradient: sine_backward(gradient, ctx.saved_tensors[0]),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)


@torch.library.custom_op("remat_beyond::counted", mutates_args={"count"})
def counted(x: Tensor, count: Tensor) -> Tensor:
    count.add_(1)
    return x * count


@torch.library.custom_op(
    "remat_beyond::noise", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,)
)
def noise(x: Tensor) -> Tensor:
    return torch.rand_like(x)


for like_first in (twice, sine, noise):
    like_first.register_fake(torch.empty_like)
sine_backward.register_fake(lambda gradient, x: torch.empty_like(x))
counted.register_fake(lambda x, count: torch.empty_like(x))


class Counting(nn.Module):
    """A custom op that writes into a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * counted(x.detach(), self.count).sigmoid()


class Doubling(torch.autograd.Function):
    """A backward that is not the derivative, so that it shows if it is not the one that ran."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * x.cos() * 2


class Checkpointed(nn.Module):
    """A region the user checkpoints, with dropout inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.inner, x, use_reentrant=False)


class Block(nn.Module):
    """A layer whose code is compiled once for all instances."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    @torch.compiler.nested_compile_region
    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(x))))


class QuantizedWeight(nn.Module):
    """A weight of 8 bits that is scaled where it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-128, 127, (WIDTH, WIDTH), dtype=torch.int8))
        self.register_buffer("scale", torch.rand(WIDTH) * 0.01)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(x, self.weight.to(x.dtype) * self.scale[:, None])


class Wrapped(Tensor):
    """The plainest wrapper subclass: it holds a tensor and does what that does."""

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        return Tensor._make_wrapper_subclass(  # type: ignore[no-any-return]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device,
            requires_grad=inner.requires_grad,
        )  # fmt: skip

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __repr__(self) -> str:  # torch's, which its traces call, needs the numbers
        return f"Wrapped({tuple(self.shape)})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["inner"], None

    @staticmethod
    def __tensor_unflatten__(parts: Any, meta: Any, size: Any, stride: Any) -> Wrapped:
        return Wrapped(parts["inner"])

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tree_map = torch.utils._pytree.tree_map

        def unwrapped(item: Any) -> Any:
            return item.inner if isinstance(item, Wrapped) else item

        def wrapped(item: Any) -> Any:
            return Wrapped(item) if isinstance(item, Tensor) else item

        plain_args, plain = tree_map(unwrapped, (args, kwargs or {}))
        result = tree_map(wrapped, op(*plain_args, **plain))
        return return_and_correct_aliasing(op, args, kwargs or {}, result)


def subclass_parameter() -> nn.Module:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.weight = nn.Parameter(Wrapped(layer.weight.detach().clone()))
    return layer


def branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: y.sin() * 2, lambda y: y.cos() + y, (x,))


def nested_branches(x: Tensor) -> Tensor:
    """The branch that takes most is the second one inside the first."""

    def small(y: Tensor) -> Tensor:
        return y.sin() * 2

    def large(y: Tensor) -> Tensor:
        return (y.repeat(1, 64).sin().sort(1).values * 2)[:, : y.shape[1]] + y

    def asks_again(y: Tensor) -> Tensor:
        return torch.cond(y.mean() > 100, small, large, (y,))

    return torch.cond(x.sum() > 0, asks_again, small, (x,))


def random_branches(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda y: F.dropout(y), lambda y: F.dropout(y, 0.3), (x,))


def scanned(x: Tensor) -> Tensor:
    from torch._higher_order_ops.scan import scan

    def step(carried: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        return carried * 0.9 + row.sin(), carried * row

    last, rows = scan(step, torch.zeros(WIDTH), x)
    return rows + last


def looped(x: Tensor) -> Tensor:
    from torch._higher_order_ops.while_loop import while_loop

    start = torch.tensor(0), x.detach()
    _, y = while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y.sin()), start)
    return x * y


def mapped(x: Tensor) -> Tensor:
    from torch._higher_order_ops.map import map as each_row

    return each_row(lambda row: row.sin() * row, x)


def jagged(x: Tensor) -> Tensor:
    rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 5, 20, BATCH]))
    return (rows.sin() * rows).values()


def rotated(x: Tensor) -> Tensor:
    angles = torch.arange(WIDTH // 2 + 1.0)
    return torch.fft.irfft(torch.fft.rfft(x) * torch.polar(torch.ones_like(angles), angles), WIDTH)


def half_precision(x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return (x @ torch.ones(WIDTH, WIDTH)).float().sin()


def fake_quantized(x: Tensor) -> Tensor:
    return torch.fake_quantize_per_tensor_affine(x.sin(), 0.1, 0, -128, 127)


def printing(x: Tensor) -> Tensor:
    torch._higher_order_ops.print("one step")
    return x.sin()


@torch.compiler.disable
def disabled(x: Tensor) -> Tensor:
    return x.sin()


def sparse(x: Tensor) -> Tensor:
    where = torch.tensor([[0, 1, 2], [1, 0, 3]])
    return torch.sparse.mm(torch.sparse_coo_tensor(where, torch.ones(3), (BATCH, BATCH)), x) + x


def flexible(x: Tensor) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention

    heads = x.view(1, BATCH, 2, WIDTH // 2).transpose(1, 2)
    out = flex_attention(heads, heads, heads, score_mod=lambda s, b, h, q, k: s + (q - k))
    return out.transpose(1, 2).reshape(BATCH, WIDTH)
