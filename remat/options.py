"""The options of ``compile``, ``plan`` and the backend: the same names everywhere, all checked.

An option this version cannot honour is refused: an option that does nothing would be a defect.
"""

from __future__ import annotations

import difflib
import importlib
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from remat.budget import Budget as Budget
from remat.budget import machine_memory as machine_memory
from remat.budget import parse_budget as parse_budget
from remat.solvers.errors import InvalidOption
from remat.solvers.registry import find

if TYPE_CHECKING:
    from remat.plans import Plan

EXECUTORS: Final = ("eager", "inductor", "cudagraph")
ON_UNPLANNED: Final = ("warn", "raise", "ignore")
COSTS: Final = ("measured", "roofline", "flops")


def default_executor() -> str:
    """``$REMAT_EXECUTOR``, else ``"inductor"`` where a compiler is found, else ``"eager"``."""
    if chosen := os.environ.get("REMAT_EXECUTOR"):
        return _one_of("REMAT_EXECUTOR", chosen, EXECUTORS)
    compilers = filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++", "cl"))
    return "inductor" if any(map(shutil.which, compilers)) else "eager"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to plan and run a training step. Checked when made; never half valid.

    Fields have the types they are read with; :meth:`make` also takes what people write (a path for
    ``plan``, None for ``executor``, one pattern for ``keep``).

    Attributes:
        memory_budget: see :func:`parse_budget`.
        solver: ``"auto"``, or the name of one algorithm.
        every_n_layers: checkpoint layers 1, N+1, 2N+1, … and keep the rest; chooses the solver of
            that name.
        offload: where values may go that backward needs: ``"host"`` (or True), the host memory of a
            CUDA device; or a directory on a disk, of a CUDA device or the CPU. False: nowhere.
        executor: who runs the plan, ``"eager"``, ``"inductor"`` or ``"cudagraph"``. None is read
            as :func:`default_executor`.
        time_limit: seconds the solver may take for one graph; under inductor it takes at most a
            share of what compiling takes.
        gap: stop solving when a better plan could be faster by at most this share (0.01 = 1 %).
        device: what the plan is for, ``"cuda"``, ``"h100"``; None: where the inputs are.
        keep, recompute: names or patterns of modules, "lm_head", "layers.*.mlp": what they make is
            not computed again, or not kept for backward; see :mod:`remat.passes.choices`.
        optimizer: counts its state as resident bytes.
        on_unplanned: what to do about a call that was never planned: ``"warn"``, ``"raise"``,
            ``"ignore"``.
        double_backward: backward may go through gradients (``create_graph=True``). Compiled graphs
            hold one backward, so graphs that train then run uncompiled and unplanned.
        inductor: options of inductor's, as ``torch.compile(options=...)`` takes them. With
            ``"cudagraph"``, graphs are then compiled, and recorded, by inductor.
        plan: a stored plan to replay, or the path of one (it is loaded here).
        progress: called while a plan is sought, maybe from another thread, with (seconds of the
            best plan or None, seconds no plan can beat) as they improve.
        cost: ``"measured"``, ``"roofline"`` or ``"flops"``; None: measured where the device is
            there, else roofline.

    Raises:
        InvalidOption: naming the option, what was given, and what is meant.
    """

    memory_budget: int | float | str | None = None
    solver: str = "auto"
    every_n_layers: int | None = None
    offload: str | Literal[False] = False
    executor: str | None = None
    time_limit: float = 10.0
    gap: float = 0.0
    device: str | None = None
    keep: tuple[str, ...] = ()
    recompute: tuple[str, ...] = ()
    optimizer: Any = None
    on_unplanned: Literal["warn", "raise", "ignore"] = "warn"
    double_backward: bool = False
    inductor: dict[str, Any] | None = None
    plan: Plan | None = None
    cost: Literal["measured", "roofline", "flops"] | None = None
    progress: Callable[[float | None, float], None] | None = None

    def __post_init__(self) -> None:
        parse_budget(self.memory_budget)
        self._set("every_n_layers", _every_n_layers(self.every_n_layers))
        self._set("solver", _solver(self.solver, self.every_n_layers))
        self._set("executor", _one_of("executor", self.executor or default_executor(), EXECUTORS))
        self._set("time_limit", _seconds("time_limit", self.time_limit))
        self._set("gap", _share("gap", self.gap))
        self._set("device", _device(self.device))
        self._set("offload", _offload(self.offload))
        self._set("keep", _patterns("keep", self.keep))
        self._set("recompute", _patterns("recompute", self.recompute))
        self._set("inductor", _inductor(self.inductor))
        _check_optimizer(self.optimizer)
        _one_of("on_unplanned", self.on_unplanned, ON_UNPLANNED)
        if self.progress is not None and not callable(self.progress):
            raise InvalidOption(
                f"progress={self.progress!r} is not a function; it is called with (seconds of the "
                "best plan or None, seconds no plan can beat)"
            )
        if not isinstance(self.double_backward, bool):
            _refuse("double_backward", self.double_backward, "must be True or False")
        if self.cost is not None:
            _one_of("cost", self.cost, COSTS)
        _refuse_what_this_version_lacks(self)
        self._set("plan", _plan(self.plan))
        if self.plan is not None and self.solver != "auto":
            raise InvalidOption(
                f"solver={self.solver!r} has nothing to solve beside a stored plan, which brings "
                "its schedule: give one of the two"
            )
        if self.plan is not None and self.memory_budget is not None:
            raise InvalidOption(
                f"plan and memory_budget={self.memory_budget!r} both say what the step may take; "
                "a stored plan brings its own budget: give one of the two"
            )
        _check_patterns_of_plan(self)

    @classmethod
    def make(cls, **given: Any) -> Options:
        """Options from names and values, as the public functions and ``torch.compile`` take them.

        Raises:
            InvalidOption: an unknown name (the nearest known one is suggested) or a bad value.
        """
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise InvalidOption(f"unknown option {name!r}{hint} (known: {', '.join(known)})")
        return cls(**given)

    @property
    def budget(self) -> Budget:
        """``memory_budget``, read."""
        return parse_budget(self.memory_budget)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


def _refuse_what_this_version_lacks(options: Options) -> None:
    """Known options that do nothing yet; a line goes when what it names arrives."""
    if options.inductor is not None and options.executor == "eager":
        raise InvalidOption(
            f"inductor={options.inductor!r} says nothing to executor={options.executor!r}; leave "
            'it out, or write executor="inductor"'
        )
    if options.offload is not False and options.executor == "cudagraph":
        _check_recorded_offload(options)


def _check_recorded_offload(options: Options) -> None:
    """A CUDA graph records copies to pinned memory, and by our own recorder."""
    if options.offload != "host":
        raise InvalidOption(
            f"offload={options.offload!r}: a CUDA graph cannot write files; write "
            'offload="host", or executor="eager"'
        )
    if options.inductor is not None:
        raise InvalidOption(
            f"inductor={options.inductor!r} has inductor's cudagraph trees record, which do not "
            'know offload="host"; leave inductor= out, or write executor="inductor"'
        )


def _check_patterns_of_plan(options: Options) -> None:
    plan, given = options.plan, (options.keep, options.recompute)
    if plan is not None and given not in (((), ()), (plan.keep, plan.recompute)):
        raise InvalidOption(
            "a stored plan brings its own keep= and recompute=: leave them out beside plan="
        )


def _refuse(name: str, given: object, meant: str) -> NoReturn:
    raise InvalidOption(f"{name}={given!r}: {meant}")


def _one_of(name: str, given: object, known: tuple[str, ...]) -> str:
    if isinstance(given, str) and given in known:
        return given
    near = difflib.get_close_matches(str(given), known, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    _refuse(name, given, f"must be one of {', '.join(map(repr, known))}{hint}")


def _number(name: str, given: object, meant: str) -> float:
    if isinstance(given, bool) or not isinstance(given, int | float) or math.isnan(given):
        _refuse(name, given, meant)
    return float(given)


def _seconds(name: str, given: object) -> float:
    meant = "must be a finite number of seconds above 0, like 10.0"
    seconds = _number(name, given, meant)
    if not 0 < seconds < math.inf:  # the search ends with the time, and only then
        _refuse(name, given, meant)
    return seconds


def _share(name: str, given: object) -> float:
    meant = "must be a share from 0 up to, but not including, 1, like 0.01 for 1 %"
    share = _number(name, given, meant)
    if not 0 <= share < 1:
        _refuse(name, given, meant)
    return share


def _every_n_layers(given: object) -> int | None:
    if given is None:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 1:
        _refuse(
            "every_n_layers", given, "must be an int of at least 1, like 2 for every other layer"
        )
    return given


def _solver(given: object, every_n_layers: int | None) -> str:
    if not isinstance(given, str):
        _refuse("solver", given, 'must be a name, like "auto" or "ilp"')
    if every_n_layers is not None and given not in ("auto", "every_n_layers"):
        raise InvalidOption(
            f"every_n_layers={every_n_layers} says nothing to solver={given!r}; leave solver out, "
            'or write "every_n_layers"'
        )
    if given == "auto":
        return given if every_n_layers is None else "every_n_layers"
    # Importing the solvers registers them and costs numba and PuLP: only a named one is looked up.
    importlib.import_module("remat.solvers.choose")
    find(given)
    return given


def _device(given: object) -> str | None:
    """A name; a ``torch.device`` is one, without importing torch to say so."""
    if given is None or (isinstance(given, str) and given.strip()):
        return given
    if type(given).__module__ == "torch" and type(given).__name__ == "device":
        return str(given)
    _refuse("device", given, 'must be a device or a name, like "cuda", "cpu" or "h100"')


def _offload(given: object) -> str | Literal[False]:
    if isinstance(given, bool):
        return "host" if given else False
    if isinstance(given, str | os.PathLike) and os.fspath(given):
        return "host" if given == "host" else _directory(str(os.fspath(given)))
    _refuse("offload", given, 'must be False, True, "host", or a directory for the disk')


def _directory(given: str) -> str:
    from remat.passes.disk import check_directory

    # A program may change its working directory between two steps.
    path = os.path.abspath(os.path.expanduser(given))
    check_directory(path)
    return path


def _patterns(name: str, given: object) -> tuple[str, ...]:
    meant = 'must be names or patterns of modules, like ("lm_head", "layers.*.mlp")'
    if isinstance(given, str):
        return (given,)
    if not isinstance(given, Iterable):
        _refuse(name, given, meant)
    patterns = tuple(given)
    if not all(isinstance(pattern, str) and pattern for pattern in patterns):
        _refuse(name, given, meant)
    return patterns


def _inductor(given: object) -> dict[str, Any] | None:
    if given is None:
        return None
    if not isinstance(given, Mapping):
        _refuse("inductor", given, 'must be a mapping, like {"max_autotune": True}')
    return dict(given)


def _check_optimizer(given: object) -> None:
    if given is not None and not hasattr(given, "param_groups"):
        _refuse(
            "optimizer", given, "must be an optimizer, like torch.optim.AdamW(model.parameters())"
        )


def _plan(given: object) -> Plan | None:
    if given is None:
        return None
    from remat.plans import Plan

    if isinstance(given, Plan):
        return given
    if not isinstance(given, str | os.PathLike):
        _refuse("plan", given, 'must be a Plan, or the path of a stored one, like "plan.json"')
    path = Path(given)
    if not path.is_file():
        _refuse("plan", str(path), "no such file; write a plan with plan.save(path)")
    return Plan.load(path)
