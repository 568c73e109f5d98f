"""What a solver is given: the ops of one training step, the storages they touch, their costs.

A :class:`Problem` is plain frozen data. Values are *storages* (views share one and are not values);
ops stand in program order. The budget and the link are arguments of ``solve``, not part of it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import math
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

from remat.solvers.errors import InvalidOption, InvalidProblem

FORMAT: Final = "remat.problem/1"

Phase = Literal["forward", "deferred", "backward"]
OutputOf = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class Value:
    """One storage.

    Attributes:
        name: unique among the values of a problem.
        bytes: what the allocator hands out for it.
        owned: the caller owns it (parameter, buffer, input): it is always there, and its bytes are
            part of ``Problem.fixed_bytes``, not counted again.
        tangent: it arrives, from outside, when backward starts.
        output: which part returns it; an output stays alive to the end once computed.
        offloadable: may be copied to another tier and back.
        keepable: may be alive when backward starts. False: dropped by then, and computed again.
    """

    name: str
    bytes: int
    owned: bool = False
    tangent: bool = False
    output: OutputOf | None = None
    offloadable: bool = True
    keepable: bool = True


@dataclass(frozen=True, slots=True)
class Op:
    """One operation that allocates, or has an effect.

    Attributes:
        name: unique among the ops of a problem.
        reads, writes: indices of values.
        phase: ``forward`` (in program order, before any backward op), ``backward`` (exactly once,
            in order), ``deferred`` (depends on no gradient and only backward reads it: runs when
            first demanded).
        seconds: how long it takes.
        flops: floating point operations.
        workspace: bytes it allocates and releases while it runs. Negative for a backward op that
            writes over an input nobody reads after it: the two are one allocation.
        random: draws random numbers; it may be run again if its state is replayed.
        rerunnable: may be run a second time.
        layer, source: the module and the source line it comes from.
    """

    name: str
    phase: Phase
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    seconds: float = 0.0
    flops: int = 0
    workspace: int = 0
    target: str = ""
    random: bool = False
    rerunnable: bool = True
    layer: str = ""
    source: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """Where values can be offloaded to. Bandwidths in bytes per second, one queue each way.

    Raises:
        InvalidOption: a bandwidth that is not > 0, or a latency that is not finite and >= 0.
    """

    offload_bandwidth: float
    reload_bandwidth: float
    latency: float = 0.0

    def __post_init__(self) -> None:
        for way in ("offload_bandwidth", "reload_bandwidth"):
            if not getattr(self, way) > 0:
                raise InvalidOption(
                    f"{way} is {getattr(self, way)!r}; it must be > 0 bytes a second, such as 25e9"
                )
        if not 0 <= self.latency < math.inf:
            raise InvalidOption(f"latency is {self.latency!r}; it must be finite and >= 0 seconds")

    def seconds_out(self, size: int) -> float:
        """Seconds to copy ``size`` bytes out."""
        return self.latency + size / self.offload_bandwidth

    def seconds_back(self, size: int) -> float:
        """Seconds to copy ``size`` bytes back."""
        return self.latency + size / self.reload_bandwidth

    def seconds(self, size: int) -> float:
        """Seconds of the slower of the two copies of ``size`` bytes."""
        return max(self.seconds_out(size), self.seconds_back(size))


@dataclass(frozen=True)
class Problem:
    """One training step as the solvers see it.

    Args:
        values, ops: see :class:`Value` and :class:`Op`; ops in program order.
        fixed_bytes: bytes alive during the whole step whatever the plan (resident bytes).
        name, cost: free text for people: what it is, how ``seconds`` was modelled.

    Raises:
        InvalidProblem: naming the value or op that is wrong.
    """

    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    fixed_bytes: int = 0
    name: str = ""
    cost: str = ""

    def __post_init__(self) -> None:
        _check_values(self)
        _check_ops(self)
        _check_order(self)

    @cached_property
    def key(self) -> str:
        """SHA-256 of the canonical JSON."""
        return hashlib.sha256(_canonical(self.to_json()).encode()).hexdigest()

    @cached_property
    def producer(self) -> tuple[int, ...]:
        """For each value, the op that writes it, or -1."""
        producer = [-1] * len(self.values)
        for index, op in enumerate(self.ops):
            for value in op.writes:
                producer[value] = index
        return tuple(producer)

    @cached_property
    def forward(self) -> tuple[int, ...]:
        """Indices of the forward ops, in order."""
        return tuple(i for i, op in enumerate(self.ops) if op.phase == "forward")

    @cached_property
    def deferred(self) -> tuple[int, ...]:
        """Indices of the deferred ops, in order."""
        return tuple(i for i, op in enumerate(self.ops) if op.phase == "deferred")

    @cached_property
    def backward(self) -> tuple[int, ...]:
        """Indices of the backward ops, in order."""
        return tuple(i for i, op in enumerate(self.ops) if op.phase == "backward")

    @cached_property
    def tangents(self) -> tuple[int, ...]:
        """Indices of the values that arrive when backward starts."""
        return tuple(i for i, value in enumerate(self.values) if value.tangent)

    @cached_property
    def dropped(self) -> tuple[int, ...]:
        """Indices of the values that may not be alive when backward starts."""
        return tuple(i for i, value in enumerate(self.values) if not value.keepable)

    @cached_property
    def unrestricted(self) -> Problem:
        """The same problem where every value may be kept."""
        if not self.dropped:
            return self
        return replace(self, values=tuple(replace(value, keepable=True) for value in self.values))

    @cached_property
    def base_seconds(self) -> float:
        """Seconds of every op run once."""
        return math.fsum(op.seconds for op in self.ops)

    @cached_property
    def base_flops(self) -> int:
        """Floating point operations of every op run once."""
        return sum(op.flops for op in self.ops)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data in the format ``remat.problem/1``."""
        return {
            "format": FORMAT,
            "name": self.name,
            "cost": self.cost,
            "fixed_bytes": self.fixed_bytes,
            "values": [_value_to_json(value) for value in self.values],
            "ops": [{**asdict(op), "seconds": float(op.seconds) + 0.0} for op in self.ops],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Problem:
        """The inverse of :meth:`to_json`; absent fields have their defaults."""
        if not isinstance(data, Mapping) or data.get("format") != FORMAT:
            found = data.get("format") if isinstance(data, Mapping) else type(data).__name__
            raise InvalidProblem(f"not a problem: format is {found!r}, expected {FORMAT!r}")
        try:
            return Problem(
                values=tuple(Value(**row) for row in data["values"]),
                ops=tuple(
                    Op(**{**row, "reads": tuple(row["reads"]), "writes": tuple(row["writes"])})
                    for row in data["ops"]
                ),
                fixed_bytes=data.get("fixed_bytes", 0),
                name=data.get("name", ""),
                cost=data.get("cost", ""),
            )
        except (KeyError, TypeError) as error:
            raise InvalidProblem(f"malformed problem: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write canonical JSON, gzip-compressed where the path ends in ``.gz``."""
        text = _canonical(self.to_json()).encode()
        path = Path(path)
        path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)

    @staticmethod
    def load(path: str | Path) -> Problem:
        """Read what :meth:`save` wrote.

        Raises:
            InvalidProblem: the file is no problem, or an impossible one.
        """
        raw = Path(path).read_bytes()
        try:
            text = gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw
        except (EOFError, OSError, zlib.error) as error:
            raise InvalidProblem(f"{path} is a damaged gzip file: {error}") from error
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise InvalidProblem(f"{path} is not JSON: {error}") from error
        return Problem.from_json(data)


def _value_to_json(value: Value) -> dict[str, Any]:
    data = asdict(value)
    if value.keepable:  # so that problems from before there was this field have the keys they had
        del data["keepable"]
    return data


def _canonical(data: object) -> str:
    return json.dumps(data, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _check_values(problem: Problem) -> None:
    _refuse_repeats("value", [value.name for value in problem.values])
    if not _is_count(problem.fixed_bytes):
        raise InvalidProblem(f"fixed_bytes is {problem.fixed_bytes!r}; it must be an int >= 0")
    for value in problem.values:
        if not _is_count(value.bytes):
            raise InvalidProblem(
                f"value {value.name!r} has {value.bytes!r} bytes; needs an int >= 0"
            )
        if value.owned and value.tangent:
            raise InvalidProblem(f"value {value.name!r} cannot be both owned and a tangent")
        if value.output not in (None, "forward", "backward"):
            raise InvalidProblem(f"value {value.name!r} has an unknown output {value.output!r}")


def _check_ops(problem: Problem) -> None:
    _refuse_repeats("op", [op.name for op in problem.ops])
    count = len(problem.values)
    for op in problem.ops:
        if op.phase not in ("forward", "deferred", "backward"):
            raise InvalidProblem(f"op {op.name!r} has an unknown phase {op.phase!r}")
        is_number = isinstance(op.seconds, int | float) and not isinstance(op.seconds, bool)
        if not (is_number and 0 <= op.seconds < math.inf):
            raise InvalidProblem(
                f"op {op.name!r} takes {op.seconds!r} seconds; needs a finite number >= 0"
            )
        if not _is_count(op.flops):
            raise InvalidProblem(f"op {op.name!r} has flops {op.flops!r}; needs an int >= 0")
        for value in (*op.reads, *op.writes):
            if not (_is_count(value) and value < count):
                raise InvalidProblem(f"op {op.name!r} names value {value!r}; there are {count}")
        for name, indices in (("reads", op.reads), ("writes", op.writes)):
            if len(set(indices)) != len(indices):
                raise InvalidProblem(f"op {op.name!r} {name} a value twice")
        _check_workspace(problem, op)


def _check_workspace(problem: Problem, op: Op) -> None:
    touched = {*op.reads, *op.writes} if op.phase == "backward" else set()
    least = -sum(problem.values[v].bytes for v in touched)
    if not _is_count(op.workspace) and not (type(op.workspace) is int and op.workspace >= least):
        raise InvalidProblem(
            f"op {op.name!r} has workspace {op.workspace!r}; needs an int >= {least} "
            "(below 0 only in backward, where an input is written over)"
        )


def _check_order(problem: Problem) -> None:
    values, ops = problem.values, problem.ops
    writer: dict[int, int] = {}
    for index, op in enumerate(ops):
        for v in op.writes:
            if v in writer:
                names = f"{ops[writer[v]].name!r} and {op.name!r}"
                raise InvalidProblem(f"value {values[v].name!r} has two writers: {names}")
            if values[v].owned or values[v].tangent:
                kind = "the caller owns" if values[v].owned else "arrives from outside"
                raise InvalidProblem(f"op {op.name!r} writes {values[v].name!r}, which {kind}")
            writer[v] = index
    for index, op in enumerate(ops):
        for v in op.reads:
            _check_read(problem, writer, index, v)
    for v, value in enumerate(values):
        if value.output and v not in writer and not (value.owned or value.tangent):
            raise InvalidProblem(f"nobody writes the output {value.name!r}")
        if value.output == "forward" and v in writer and ops[writer[v]].phase != "forward":
            op = ops[writer[v]]
            raise InvalidProblem(
                f"forward returns {value.name!r}, but {op.phase} op {op.name!r} writes it"
            )
        if not value.keepable:
            _check_dropped(problem, value, writer.get(v))


def _check_dropped(problem: Problem, value: Value, writer: int | None) -> None:
    op = None if writer is None else problem.ops[writer]
    if op is None or op.phase != "forward" or not op.rerunnable or value.output or not value.bytes:
        raise InvalidProblem(
            f"value {value.name!r} may not be kept, so it must have bytes, be no output, and be "
            "written by a forward op that may be run again"
        )


def _check_read(problem: Problem, writer: Mapping[int, int], index: int, v: int) -> None:
    op, value = problem.ops[index], problem.values[v]
    if value.owned:
        return
    source = "backward" if value.tangent else None
    if not value.tangent:
        if v not in writer:
            raise InvalidProblem(f"op {op.name!r} reads {value.name!r}, which nobody writes")
        if writer[v] >= index:
            other = problem.ops[writer[v]].name
            raise InvalidProblem(
                f"op {op.name!r} reads {value.name!r} before op {other!r} writes it: "
                "the ops form a cycle or are out of program order"
            )
        source = problem.ops[writer[v]].phase
    allowed = {
        "forward": ("forward",),
        "deferred": ("forward", "deferred"),
        "backward": ("forward", "deferred", "backward"),
    }[op.phase]
    if source not in allowed:
        raise InvalidProblem(f"{op.phase} op {op.name!r} reads {value.name!r}, which is {source}")


def _refuse_repeats(kind: str, names: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            raise InvalidProblem(f"two {kind}s are named {name!r}")
        seen.add(name)


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0
