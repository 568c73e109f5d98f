"""Hypothesis strategies for valid problems, small enough for ``brute`` unless told otherwise.

Bytes and seconds are small integers, so that sums are exact and ties are common.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hypothesis import strategies as st

from remat.solvers.problem import Link, Op, OutputOf, Phase, Problem, Value
from remat.solvers.retention import computes_from_retention
from remat.solvers.structure import Structure

BYTES = st.integers(0, 8)
SECONDS = st.integers(0, 6).map(float)
WORKSPACES = st.sampled_from((0, 0, 0, 1, 5))


@dataclass
class _Draft:
    """A problem under construction; every method appends and returns indices."""

    draw: st.DrawFn
    values: list[Value] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)

    def value(self, name: str, **kind: object) -> int:
        self.values.append(Value(name, self.draw(BYTES), **kind))  # type: ignore[arg-type]
        return len(self.values) - 1

    def op(
        self,
        phase: Phase,
        readable: list[int],
        outputs: tuple[int, int],
        output: OutputOf | None,
        layer: str = "",
    ) -> list[int]:
        """One op that reads up to three values and writes between ``outputs`` many new ones."""
        name = f"{phase}{len(self.ops)}"
        reads = self.draw(_some(readable))
        writes = [
            self.value(f"{name}_{k}", output=output if self.draw(_CHANCE) else None)
            for k in range(self.draw(st.integers(*outputs)))
        ]
        self.ops.append(
            Op(
                name,
                phase,
                tuple(reads),
                tuple(writes),
                seconds=self.draw(SECONDS),
                flops=self.draw(st.integers(0, 9)),
                workspace=self.draw(WORKSPACES) - self.overwritten(phase, reads, writes),
                random=self.draw(_CHANCE),
                rerunnable=not self.draw(_CHANCE),
                layer=layer,
            )
        )
        return writes

    def drop_some(self) -> None:
        """Let some of the values that may be computed again not be kept."""
        again = (op for op in self.ops if op.phase == "forward" and op.rerunnable)
        for v in [v for op in again for v in op.writes]:
            value = self.values[v]
            if value.bytes and not value.output and self.draw(st.booleans()):
                self.values[v] = replace(value, keepable=False)

    def overwritten(self, phase: Phase, reads: list[int], writes: list[int]) -> int:
        """Bytes of inputs that a backward op writes over."""
        if phase != "backward" or not self.draw(_CHANCE):
            return 0
        return self.draw(st.integers(0, sum(self.values[v].bytes for v in {*reads, *writes})))


_CHANCE = st.sampled_from((False, False, False, True))


def _some(readable: list[int], most: int = 3) -> st.SearchStrategy[list[int]]:
    if not readable:
        return st.just([])
    return st.lists(st.sampled_from(readable), max_size=most, unique=True)


@st.composite
def problems(
    draw: st.DrawFn,
    max_forward: int = 4,
    max_deferred: int = 1,
    max_backward: int = 3,
    layers: int = 0,
    drops: bool = True,
) -> Problem:
    """Any valid problem.

    Shared inputs, several outputs an op, deferred ops (some demanded only as outputs, some by
    nobody), pinned outputs, unread tangents, workspaces, owned values, ops that may not run again,
    ops with an effect and no writes, values of zero bytes.

    With ``layers``, forward ops belong to ``model.layers.0`` and so on, in order. With ``drops``,
    there may be values that may not be kept.
    """
    draft = _Draft(draw)
    owned = [draft.value(f"owned{k}", owned=True) for k in range(draw(st.integers(0, 2)))]
    tangents = [draft.value(f"tangent{k}", tangent=True) for k in range(draw(st.integers(0, 2)))]
    count = draw(st.integers(0, max_forward))
    forward: list[int] = []
    for position in range(count):
        layer = f"model.layers.{position * layers // count}.mlp" if layers else ""
        forward += draft.op("forward", owned + forward, (0, 2), "forward", layer)
    deferred: list[int] = []
    for _ in range(draw(st.integers(0, max_deferred))):
        deferred += draft.op("deferred", owned + forward + deferred, (1, 2), "backward")
    backward: list[int] = []
    for _ in range(draw(st.integers(0, max_backward))):
        readable = forward + deferred + tangents + backward + owned
        backward += draft.op("backward", readable, (0, 2), "backward")
    fixed = draw(st.integers(0, 3))
    if drops and draw(_CHANCE):
        draft.drop_some()
    return Problem(tuple(draft.values), tuple(draft.ops), fixed_bytes=fixed, name="random")


@st.composite
def chains(
    draw: st.DrawFn,
    min_length: int = 1,
    max_length: int = 4,
    uniform: bool = False,
    reads_output: bool | None = None,
) -> Problem:
    """A chain of ``length`` stages; see :func:`chain`.

    Args:
        uniform: every stage costs and weighs the same, and gradients weigh what activations do.
        reads_output: the backward op reads its stage's output too; None draws it.
    """
    length = draw(st.integers(min_length, max_length))
    if reads_output is None:
        reads_output = draw(st.booleans())
    if uniform:
        size, seconds = draw(st.integers(1, 8)), draw(st.integers(1, 6).map(float))
        return chain([size] * (length + 1), [seconds] * length, reads_output=reads_output)
    sizes = draw(st.lists(BYTES, min_size=length + 1, max_size=length + 1))
    seconds_list = draw(st.lists(SECONDS, min_size=length, max_size=length))
    return chain(sizes, seconds_list, reads_output=reads_output)


def chain(
    sizes: list[int], seconds: list[float], *, reads_output: bool = False, sink: bool = True
) -> Problem:
    """``x0 -> x1 -> ... -> xn`` forward and ``gn -> ... -> g0`` back; ``x0`` is owned.

    Stage i reads ``x(i-1)``; its backward reads ``gi`` and ``x(i-1)``, and ``xi`` with
    ``reads_output``. With ``sink``, the gradient ``gn`` is a tangent of no bytes and ``xn`` an
    output of no bytes, as a loss is: then only ``x1 ... x(n-1)`` and ``g`` weigh anything.
    """
    length = len(seconds)
    values = [Value("x0", sizes[0], owned=True)]
    values += [Value(f"x{i}", sizes[i]) for i in range(1, length)]
    values.append(Value(f"x{length}", 0 if sink else sizes[-1], output="forward"))
    values.append(Value(f"g{length}", 0 if sink else sizes[-1], tangent=True))
    values += [Value(f"g{i}", sizes[i]) for i in range(length - 1, 0, -1)]
    values.append(Value("g0", sizes[0], output="backward"))
    ops = [
        Op(f"f{i}", "forward", (i - 1,), (i,), seconds=seconds[i - 1]) for i in range(1, length + 1)
    ]
    for i in range(length, 0, -1):
        incoming = 2 * length + 1 - i
        reads = (incoming, i - 1, i) if reads_output else (incoming, i - 1)
        ops.append(Op(f"b{i}", "backward", reads, (incoming + 1,), seconds=2 * seconds[i - 1]))
    return Problem(tuple(values), tuple(ops), name=f"chain of {length}")


def renamed(problem: Problem) -> Problem:
    """The same problem under other names, in another alphabetical order."""
    values = tuple(replace(v, name=f"n{-i % 97}_{i}") for i, v in enumerate(problem.values))
    ops = tuple(replace(op, name=f"m{-i % 89}_{i}") for i, op in enumerate(problem.ops))
    return replace(problem, values=values, ops=ops)


@st.composite
def links(draw: st.DrawFn) -> Link:
    """A link beside ops of a few seconds and values of a few bytes: far too slow to endless."""
    bandwidths = st.sampled_from((0.01, 0.5, 2.0, 8.0, 1e9, float("inf")))
    return Link(draw(bandwidths), draw(bandwidths), draw(st.sampled_from((0.0, 0.25, 2.0))))


@st.composite
def plans(draw: st.DrawFn, problem: Problem) -> list[int]:
    """The ops of some plan, in order: what backward needs is kept or computed again at random."""
    structure = Structure(problem)
    dropped = [value.name for value in problem.values if draw(_CHANCE)]
    kept = {v for v, value in enumerate(problem.values) if value.name not in dropped}
    return computes_from_retention(problem, [kept], structure=structure)
