"""Random small modules as plain data: a :class:`Program` is drawn, shrunk and printed by
hypothesis, and :class:`Net` runs it.

Every value is a cube of ``SIZE`` × ``SIZE`` × ``SIZE`` floats, so that any instruction takes any
earlier value: transposes, slices put together again, matrix products and attention stay within it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SIZE: Final = 4
_CUBE: Final = (SIZE, SIZE, SIZE)
LOOPS: Final = ("step", "two_steps", "accumulate", "two_forwards", "twice", "subset")
CONTAINERS: Final = ("tuple", "dict", "nested")


@dataclass(frozen=True)
class Instruction:
    """One line of a program.

    Attributes:
        a, b: operands, counted back from the latest value, modulo how many there are.
        knob: which module, dimension, probability or variant, modulo how many there are.
        body: of a region (checkpoint, repeat); it sees one operand.
    """

    name: str
    a: int = 0
    b: int = 1
    knob: int = 0
    body: tuple[Instruction, ...] = ()


@dataclass(frozen=True)
class Program:
    """What a network computes, and how it is trained.

    Attributes:
        outputs: values returned, counted back from the latest; repeats are repeated outputs.
        frozen: which modules of the network do not train: every ``frozen``-th; 0 freezes none.
        input_gradient: the input requires a gradient.
        loss_inside: the network returns its loss, and the outputs beside it.
        loop: one of :data:`LOOPS`.
    """

    body: tuple[Instruction, ...]
    outputs: tuple[int, ...] = (0,)
    container: str = "tuple"
    frozen: int = 0
    input_gradient: bool = False
    loss_inside: bool = False
    loop: str = "step"


class RoundThrough(torch.autograd.Function):
    """Rounds; its backward uses a tensor kept on ``ctx``."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.inside = x.abs() < 2
        ctx.save_for_backward(x)
        return torch.round(2 * x) / 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * ctx.inside + 0.01 * x


class Net(nn.Module):
    """Runs a program; its modules are few, so that programs share weights."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program = program
        self.linears = nn.ModuleList(nn.Linear(SIZE, SIZE) for _ in range(2))
        self.convs = nn.ModuleList(nn.Conv1d(SIZE, SIZE, 3, padding=1) for _ in range(2))
        self.norms = nn.ModuleList(
            [
                nn.LayerNorm(SIZE),
                nn.BatchNorm1d(SIZE),
                nn.GroupNorm(2, SIZE),
                nn.RMSNorm(SIZE),
                nn.InstanceNorm1d(SIZE, affine=True, track_running_stats=True),
            ]
        )
        self.embedding = nn.Embedding(SIZE, SIZE)
        self.gain = nn.Parameter(torch.randn(SIZE))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, SIZE))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        if program.frozen:
            for index, parameter in enumerate(self.parameters()):
                parameter.requires_grad_(index % program.frozen != 0)
        self.gain.requires_grad_()  # something always trains

    def forward(self, x: Tensor, tokens: Tensor, state: Tensor) -> Any:
        self.inputs = tokens, state
        values = [x * self.gain]
        self.run(self.program.body, values)
        outputs = [values[-1 - place % len(values)] for place in self.program.outputs]
        if self.program.loss_inside:
            return loss_of(outputs), tuple(output.detach() for output in outputs)
        if self.program.container == "dict":
            return {str(index): output for index, output in enumerate(outputs)}
        return tuple(outputs) if self.program.container == "tuple" else [outputs[0], {"l": outputs}]

    def run(self, body: tuple[Instruction, ...], values: list[Tensor]) -> None:
        for line in body:
            a, b = (values[-1 - place % len(values)] for place in (line.a, line.b))
            values.append(INSTRUCTIONS[line.name](self, line, a, b))


def loss_of(outputs: list[Tensor]) -> Tensor:
    """A scalar in which every output has a weight of its own."""
    terms = [(index + 1) * output.sin().mean() for index, output in enumerate(outputs)]
    return torch.stack(terms).sum()


Apply = Callable[[Net, Instruction, Tensor, Tensor], Tensor]
INSTRUCTIONS: Final[dict[str, Apply]] = {}


def _instruction(apply: Apply) -> Apply:
    INSTRUCTIONS[apply.__name__.strip("_")] = apply
    return apply


def _pick(line: Instruction, choices: Any) -> Any:
    return choices[line.knob % len(choices)]


def _dim(line: Instruction) -> int:
    return line.knob % 3


@_instruction
def linear(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    return _pick(line, net.linears)(a)


@_instruction
def conv(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    return _pick(line, net.convs)(a)


@_instruction
def norm(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    return _pick(line, net.norms)(a)


@_instruction
def activation(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    chosen: Callable[[Tensor], Tensor] = _pick(
        line, (torch.tanh, F.gelu, F.relu, torch.sin, F.silu, torch.sigmoid, torch.abs)
    )
    return chosen(a)


@_instruction
def binary(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    return _pick(line, (torch.add, torch.mul, torch.sub, torch.maximum, torch.fmin))(a, b)


@_instruction
def matmul(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    return torch.matmul(a, b.mT if line.knob % 2 else b) / SIZE


@_instruction
def reduction(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    dim = line.knob % 3
    variants: tuple[Callable[[], Tensor], ...] = (
        lambda: a.softmax(dim),
        lambda: a - a.mean(dim, keepdim=True),
        lambda: a / (1 + a.norm(dim=dim, keepdim=True)),
        lambda: a.cumsum(dim),
        lambda: b * a.amax(dim, keepdim=True),
        lambda: b + a.logsumexp(dim, keepdim=True),
        lambda: a * a.var(dim, keepdim=True),
        lambda: b + a.max(dim, keepdim=True).values,
    )
    return variants[line.knob // 3 % len(variants)]()


@_instruction
def attention(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (a, b, a + b))
    dropout = 0.3 if line.knob % 4 == 3 else 0.0
    mixed = F.scaled_dot_product_attention(
        q, k, v, dropout_p=dropout if net.training else 0.0, is_causal=line.knob % 2 == 1
    )
    return mixed.transpose(1, 2).flatten(-2)


@_instruction
def transpose(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    return a.transpose(*_pick(line, ((0, 1), (1, 2), (0, 2))))


@_instruction
def view(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    variants: tuple[Callable[[], Tensor], ...] = (
        lambda: a.reshape(SIZE, -1).unflatten(1, (SIZE, SIZE)),
        lambda: a.reshape(-1).view(_CUBE),
        lambda: a[:, :1].expand(_CUBE),
        lambda: a.select(0, 1).unsqueeze(0).expand(_CUBE),
        lambda: a.permute(2, 0, 1),
        lambda: torch.stack(a.unbind(1)),
        lambda: a.contiguous(),
        lambda: a.diagonal(dim1=0, dim2=1).unsqueeze(1).expand(_CUBE),
        lambda: a.as_strided(_CUBE, (1, 4, 16)) if a.is_contiguous() else a.mT,
    )
    return _pick(line, variants)()


@_instruction
def parts(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    dim = _dim(line)
    variants: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.cat((a.narrow(dim, 0, 1), b.narrow(dim, 1, SIZE - 1)), dim),
        lambda: torch.cat([t * (i + 1) for i, t in enumerate(a.chunk(2, dim))][::-1], dim),
        lambda: F.pad(a[..., 1:], (0, 1), value=0.5),
        lambda: a.roll(1, dim),
        lambda: a.flip(dim),
        lambda: a.split(3, dim)[0].sum(dim, keepdim=True) * b,
        lambda: torch.stack([t.tanh() for t in a.unbind(dim)], dim),
    )
    return variants[line.knob // 3 % len(variants)]()


@_instruction
def in_place(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    """What the plain model cannot differentiate is for the caller to reject."""
    whole = a if line.knob % 2 else a.clone()
    match line.knob // 2 % 6:
        case 0:
            return whole.add_(0.5)
        case 1:
            whole[:, 0].mul_(b[:, 1])
        case 2:
            whole[..., 1:3] = b[..., :2]
        case 3:
            early = whole[:, :2]
            whole.mul_(2)
            return torch.cat((early, whole[:, 2:].relu_()), 1)
        case 4:
            whole.masked_fill_(b > 0, 0.25)
        case _:
            flat = whole.view(-1) if whole.is_contiguous() else whole.mT
            flat.sub_(1)
    return whole


@_instruction
def indexed(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    tokens, _ = net.inputs
    rows = tokens[0]
    variants: tuple[Callable[[], Tensor], ...] = (
        lambda: net.embedding(tokens),
        lambda: a + net.embedding(tokens),
        lambda: F.linear(a, net.embedding.weight),  # tied
        lambda: a[rows],
        lambda: a.index_add(0, rows, b),
        lambda: a.gather(1, tokens[..., None].expand(_CUBE)),
        lambda: a.scatter(2, tokens[..., None], 0.5),
        lambda: a.index_put((rows,), b, accumulate=True),
        lambda: a[:, :, [0, 0, 2, 1]],
    )
    return _pick(line, variants)()


@_instruction
def masked(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    variants: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.where(a > 0, a, b),
        lambda: a.masked_fill(b > 0, -1.0).softmax(-1),
        lambda: a.tril(),
        lambda: a * (b > b.mean()),
        lambda: a.clamp(-0.5, 0.5),
    )
    return _pick(line, variants)()


@_instruction
def routed(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    variants: tuple[Callable[[], Tensor], ...] = (
        lambda: torch.zeros_like(a).scatter(-1, *reversed(a.topk(2, -1))),
        lambda: a.sort(-1).values,
        lambda: a * F.one_hot(b.argmax(-1), SIZE),
        lambda: a.gather(0, b.argsort(0)),
        lambda: F.max_pool1d(a, 3, stride=1, padding=1),
        lambda: a.kthvalue(2, -1, keepdim=True).values * b,
    )
    return variants[line.knob % len(variants)]()


@_instruction
def random(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    variants: tuple[Callable[[], Tensor], ...] = (
        lambda: F.dropout(a, 0.3, net.training),
        lambda: F.dropout(a, 0.0, net.training),
        lambda: F.dropout(a, 1.0, net.training),
        lambda: a + 0.1 * torch.randn_like(a),
        lambda: a * torch.rand(_CUBE),
        lambda: F.dropout1d(a, 0.4, net.training),
        lambda: torch.where(torch.bernoulli(torch.full(_CUBE, 0.5)) > 0, a, b),
        lambda: a + torch.randperm(SIZE),
        lambda: F.rrelu(a, training=net.training),
    )
    return _pick(line, variants)()


@_instruction
def buffer(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    """Reads and writes of buffers and of the caller's ``state``; what is written is detached."""
    _, state = net.inputs
    with torch.no_grad():
        match line.knob % 6:
            case 0:
                net.scale.mul_(0.9).add_(a.mean((0, 1)), alpha=0.1)
            case 1:
                state.lerp_(a.mean((0, 1)), 0.3)
            case 2:
                net.count.add_(1)
            case 3:
                net.scale[1:].copy_(b.amax((0, 1))[1:])
    match line.knob // 6 % 3:
        case 0:
            return a * net.scale.sin()
        case 1:
            return a * state.cos()
    return a + net.count * 0.5 + net.scale


@_instruction
def parameter(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    return a * net.gain if line.knob % 2 else a + net.linears[0].weight.exp().mT


@_instruction
def cast(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    match line.knob % 4:
        case 0:
            return (a.bfloat16() * b.bfloat16()).float()
        case 1:
            return a.double().sin().float()
        case 2:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return (net.linears[0](a) + net.linears[0](b)).float()
    return torch.fft.irfft(torch.fft.rfft(a) * torch.fft.rfft(b), n=SIZE)


@_instruction
def cut(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    match line.knob % 3:
        case 0:
            return a.detach() * b
        case 1:
            with torch.no_grad():
                target = net.linears[0](a)
            return b - target
    result: Tensor = RoundThrough.apply(a)
    return result


def _region(net: Net, line: Instruction, a: Tensor) -> Tensor:
    values = [a]
    net.run(line.body, values)
    return values[-1] + 0.5 * a


@_instruction
def checkpointed(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    result: Tensor = checkpoint(lambda t: _region(net, line, t), a, use_reentrant=False)
    return result


@_instruction
def repeated(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    for _ in range(2 + line.knob % 2):
        a = _region(net, line, a)
    return a


@_instruction
def branched(net: Net, line: Instruction, a: Tensor, b: Tensor) -> Tensor:
    if net.training and a.stride(-1) == 1 and line.knob % 2:
        return _region(net, line, a)
    return a + b


REGIONS: Final = ("checkpointed", "repeated", "branched")
# Run twice by the plain model's checkpoint: what writes would be written twice there.
_WRITING: Final = ("buffer", "in_place")


def instructions(names: list[str], depth: int) -> st.SearchStrategy[Instruction]:
    """Lines of a program; bodies of regions hold fewer and simpler ones."""
    small, knobs = st.integers(0, 4), st.integers(0, 40)
    plain = [name for name in names if name not in REGIONS]
    line = st.builds(Instruction, st.sampled_from(plain), small, small, knobs)
    if depth == 0:
        return line
    inner = [name for name in plain if name not in (*_WRITING, "norm")]
    bodies = st.lists(instructions(inner, depth - 1), min_size=1, max_size=4).map(tuple)
    region = st.builds(Instruction, st.sampled_from(REGIONS), small, small, knobs, bodies)
    return st.one_of(line, line, line, line, region)


def programs(max_size: int = 12) -> st.SearchStrategy[Program]:
    """Programs of up to ``max_size`` lines."""
    return st.builds(
        Program,
        body=st.lists(instructions(list(INSTRUCTIONS), 1), min_size=1, max_size=max_size).map(
            tuple
        ),
        outputs=st.lists(st.integers(0, 6), min_size=1, max_size=3).map(tuple),
        container=st.sampled_from(CONTAINERS),
        frozen=st.sampled_from((0, 0, 2, 3)),
        input_gradient=st.booleans(),
        loss_inside=st.booleans(),
        loop=st.sampled_from(LOOPS),
    )
