"""One generated wrapper, run statement by statement on fake tensors, with kernels that do nothing.

What is alive after each statement follows from Python's own rules, not from a reading of the code.
A statement that means nothing to the replay is an error that names it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import CodeType
from typing import Any, Final, Literal, NoReturn

import torch

from remat.executors.wrapper_memory import tensors_in
from remat.executors.wrapper_names import Names
from remat.solvers.errors import RematError

Kind = Literal["forward", "backward", "inference"]

_CONSTANT: Final = re.compile(
    r"device\(type='(?P<device>\w+)'(?:, index=\d+)?\) torch\.(?P<dtype>\w+) "
    r"\((?P<shape>[\d, ]*)\) \((?P<stride>[\d, ]*)\) "
)
# What a statement outside the replay's knowledge may answer with.
_REFUSALS: Final = (
    LookupError, NameError, AttributeError, TypeError, ValueError, RuntimeError, AssertionError,
    ArithmeticError, SyntaxError,
)  # fmt: skip
_EXECUTED: Final = (ast.Assign, ast.AnnAssign, ast.Expr, ast.Delete, ast.Pass)
_ADVICE: Final = 'Compile without the inductor option that brings it, or use executor="eager"'
_TURNS: Final = 3  # of a loop: the second holds what the first has made, and the third no more


@dataclass(frozen=True)
class TensorSpec:
    """A tensor without its content.

    Attributes:
        extent: elements of its storage from the first on, ``offset`` included.
        tangent: a gradient that arrives when backward starts.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    offset: int = 0
    extent: int = 0
    tangent: bool = False

    def fake(self) -> torch.Tensor:
        """A fake tensor like it; a fake mode must be active."""
        flat = torch.empty(max(self.extent, 0), dtype=self.dtype, device=self.device)
        return torch.as_strided(flat, self.shape, self.stride, self.offset)


@dataclass(frozen=True)
class Generated:
    """One graph as inductor compiled it.

    Attributes:
        kind: which half of the step.
        source: the generated module, Python code.
        inputs: what its ``call`` takes in a list; None for what is no tensor.
        copied: its first outputs, new contents of inputs that the caller copies and drops.
    """

    kind: Kind
    source: str
    inputs: tuple[TensorSpec | None, ...]
    copied: int = 0


@dataclass(frozen=True, slots=True)
class Moment:
    """One statement of a wrapper: where it stands, bytes alive at most during it and after it."""

    kind: Kind
    line: int
    text: str
    peak: int
    after: int

    def __str__(self) -> str:
        return f"{self.kind}, line {self.line}: {self.text}"


class Run:
    """One wrapper being replayed."""

    def __init__(self, generated: Generated, names: Names) -> None:
        self.generated = generated
        self.names = names
        self.moments: list[Moment] = []
        self._lines = generated.source.splitlines()
        self._functions: dict[str, ast.FunctionDef] = {}
        self._globals = names.all()
        try:
            tree = ast.parse(generated.source)
        except SyntaxError as error:
            raise RematError(
                f"the {generated.kind} wrapper is no Python code ({error}); remat reads the "
                "Python wrappers of inductor: turn its option cpp_wrapper off"
            ) from error
        for statement in tree.body:
            self._read(statement)

    def call(self, args: list[Any]) -> Any:
        """Run ``call(args)``, which empties the list, and note every statement."""
        if "call" not in self._functions:
            raise RematError(
                f"the {self.generated.kind} wrapper has no function call(args); this version of "
                "torch generates wrappers that remat cannot replay"
            )
        return self._run(self._functions["call"], args)

    def note(self, line: int, text: str) -> None:
        """Close a statement: what died in it counts no more."""
        memory = self.names.memory
        memory.release()
        self.moments.append(Moment(self.generated.kind, line, text, memory.peak, memory.level))
        memory.reset_peak()

    def _read(self, statement: ast.stmt) -> None:
        """A statement of the module: functions, kernels, constants, short names."""
        if isinstance(statement, ast.FunctionDef):
            self._functions[statement.name] = statement
            self._globals.setdefault(statement.name, self._function(statement.name))
        elif isinstance(statement, ast.ClassDef):
            for part in statement.body:
                if isinstance(part, ast.FunctionDef):
                    self._functions[part.name] = part
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            self._define(statement.targets[0].id, statement)

    def _define(self, name: str, statement: ast.Assign) -> None:
        value = statement.value
        if name == "runner" and isinstance(value, ast.Call):
            listed = value.keywords[0].value
            assert isinstance(listed, ast.List)
            parts = [item.id for item in listed.elts if isinstance(item, ast.Name)]
            self._globals["self"] = _Runner([self._function(part) for part in parts])
        elif isinstance(value, ast.Constant) and value.value is None:
            self._globals[name] = self._constant(statement)
        elif name not in self._globals:
            # What cannot be told here is an unknown name if the wrapper uses it.
            try:
                self._globals[name] = eval(_compiled(ast.Expression(value)), self._globals)
            except _REFUSALS:
                return

    def _constant(self, statement: ast.Assign) -> Any:
        """A constant tensor: its line ends in a comment that describes it."""
        described = _CONSTANT.search(self._lines[statement.lineno - 1])
        if described is None:
            return None
        shape, stride = (
            tuple(int(part) for part in described[group].split(",") if part.strip())
            for group in ("shape", "stride")
        )
        made = torch.empty_strided(
            shape, stride, dtype=getattr(torch, described["dtype"]), device=described["device"]
        )
        self.names.memory.own(made)
        return made

    def _function(self, name: str) -> Any:
        return lambda args: self._run(self._functions[name], args)

    def _run(self, function: ast.FunctionDef, args: list[Any]) -> Any:
        return self._block(function.body, {function.args.args[-1].arg: args})

    def _block(self, body: Sequence[ast.stmt], local: dict[str, Any]) -> Any:
        for statement in body:
            if isinstance(statement, ast.With):
                for item in statement.items:
                    self._execute(ast.Expr(item.context_expr), statement, local)
                returned = self._block(statement.body, local)
                if returned is not None:
                    return returned
            elif isinstance(statement, ast.Return) and statement.value is not None:
                returned = self._evaluate(statement, statement.value, local)
                local.clear()
                self.note(statement.lineno, self._text(statement))
                return returned
            elif isinstance(statement, ast.If):
                self._choose(statement, local)
            elif isinstance(statement, ast.While):
                self._repeat(statement, local)
            elif isinstance(statement, _EXECUTED):
                self._execute(statement, statement, local)
                self._adopt_assigned(statement, local)
                self.note(statement.lineno, self._text(statement))
            else:
                self._refuse(statement, f"a {type(statement).__name__} statement")
        return None

    def _choose(self, statement: ast.If, local: dict[str, Any]) -> None:
        """Either branch may run: what one drops the other holds, so it is held.

        Torch frees operands in the first branch only. Where what the branches bind lies in storages
        of different sizes, the larger ones stay.
        """
        first = _storage_bytes(self._branch(statement, statement.body, local))
        bound = self._branch(statement, statement.orelse, local)
        second = _storage_bytes(bound)
        both = first.keys() & second.keys()
        if any(first[name] > second[name] for name in both):
            if any(first[name] < second[name] for name in both):
                self._refuse(statement, "neither of its branches leaves more than the other")
            del bound
            bound = self._branch(statement, statement.body, local)
        local.update(bound)

    def _branch(
        self, statement: ast.stmt, body: Sequence[ast.stmt], local: dict[str, Any]
    ) -> dict[str, Any]:
        """What the names mean behind it; ``local`` stays as it is."""
        names = {name: [*x] if isinstance(x, list) else x for name, x in local.items()}
        if self._block(body, names) is not None:
            self._refuse(statement, "a branch that returns")
        return names

    def _repeat(self, statement: ast.While, local: dict[str, Any]) -> None:
        """A loop runs as often as a tensor says; from the second turn on, all are alike."""
        levels = []
        for _ in range(_TURNS):
            if self._block(statement.body, local) is not None:
                self._refuse(statement, "a loop that returns")
            levels.append(self.names.memory.level)
        if levels[-1] > levels[-2]:
            self._refuse(
                statement,
                f"every turn keeps {levels[-1] - levels[-2]:,} bytes more, and how many there are "
                "lies in a tensor",
                advice='Loop in Python, a fixed number of times, or use executor="eager"',
            )

    def _execute(self, statement: ast.stmt, at: ast.stmt, local: dict[str, Any]) -> None:
        self._refuse_numbers(at)
        code = _compiled(ast.Module([ast.copy_location(statement, at)], type_ignores=[]))
        try:
            exec(code, self._globals, local)
        except _REFUSALS as error:
            self._refuse(at, str(error), error)

    def _refuse_numbers(self, at: ast.stmt) -> None:
        """A number read out of a tensor is unknown here, whatever torch makes up for it."""
        reads = (node for node in ast.walk(at) if isinstance(node, ast.Attribute))
        if any(node.attr in ("item", "tolist") for node in reads):
            self._refuse(at, "it reads a number out of a tensor")

    def _evaluate(self, at: ast.stmt, value: ast.expr, local: dict[str, Any]) -> Any:
        try:
            return eval(_compiled(ast.Expression(value)), self._globals, local)
        except _REFUSALS as error:
            self._refuse(at, str(error), error)

    def _adopt_assigned(self, statement: ast.stmt, local: dict[str, Any]) -> None:
        # Methods of tensors (`.clone()`) allocate too.
        if isinstance(statement, ast.Assign):
            for node in ast.walk(statement.targets[0]):
                if isinstance(node, ast.Name) and node.id in local:
                    self.names.memory.adopt(local[node.id])

    def _text(self, statement: ast.stmt) -> str:
        return self._lines[statement.lineno - 1].strip()

    def _refuse(
        self,
        statement: ast.stmt,
        why: str,
        error: BaseException | None = None,
        advice: str = _ADVICE,
    ) -> NoReturn:
        raise RematError(
            f"line {statement.lineno} of the {self.generated.kind} wrapper means nothing to the "
            f"replay: `{self._text(statement)}` ({why}). {advice}"
        ) from error


def _storage_bytes(local: dict[str, Any]) -> dict[tuple[str, int], int]:
    """(name, which of its tensors) → bytes of the storage it lies in."""
    return {
        (name, number): tensor.untyped_storage().nbytes()
        for name, value in local.items()
        for number, tensor in enumerate(tensors_in(value))
    }


class _Runner:
    """``self`` in a wrapper of several parts."""

    def __init__(self, partitions: list[Any]) -> None:
        self.partitions = partitions


def _compiled(tree: ast.Module | ast.Expression) -> CodeType:
    ast.fix_missing_locations(tree)
    return compile(tree, "<wrapper>", "eval" if isinstance(tree, ast.Expression) else "exec")
