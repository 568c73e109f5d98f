"""The first solve on a machine: kernels compile in the background, plans are found without them.

Compiling takes about half a minute once; afterwards the machine code is loaded from disk. Until it
is there, plans come from the one-cut MILP, tightened until the judge agrees, and from nested
checkpointing replayed in plain Python.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator

from remat.solvers.compiled import UNCACHED
from remat.solvers.milp import MilpFailure
from remat.solvers.onecut import one_cut, promising_cuts, schedule_of_cut
from remat.solvers.problem import Op, Problem, Value
from remat.solvers.schedule import Schedule
from remat.solvers.search import Effort, Searcher
from remat.solvers.seeds import Segments
from remat.solvers.segments import replay
from remat.solvers.simulate import simulate
from remat.solvers.structure import Structure

_LOG = logging.getLogger("remat")
_SECONDS_TO_LOAD = 3.0
_ROUNDS = 4
_NO_CLOCK = float("inf")


class Kernels:
    """Compiles, or loads, the kernels of the search in a thread of its own, once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.failure: str | None = None

    def wait(self, seconds: float | None) -> bool:
        """Whether the kernels are ready, after at most so many seconds (None: however long)."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._prepare, name="remat kernels")
                self._thread.start()
        self._thread.join(seconds)
        return not self._thread.is_alive() and self.failure is None

    @property
    def complaints(self) -> tuple[str, ...]:
        """Why there are no kernels, for people, where :meth:`wait` said so."""
        late = "the compiled search was not ready in time"
        return (self.failure or late, *UNCACHED[:1])

    def _prepare(self) -> None:
        try:
            exercise_kernels()
        except Exception as error:  # noqa: BLE001  reported with the solution, which needs none
            self.failure = f"compiled search: {type(error).__name__}: {error}"


KERNELS = Kernels()


def await_kernels() -> None:
    """Wait until the search is compiled: half a minute, once for an installation.

    Without it a plan can be had sooner, but the first step of a training run is no moment to be
    refused a budget that the second would be given.
    """
    if not KERNELS.wait(_SECONDS_TO_LOAD):
        _LOG.warning("remat compiles its search: once for an installation, half a minute or more")
        KERNELS.wait(None)


def exercise_kernels() -> None:
    """Call every compiled function once, on a chain of three ops that has something to search."""
    values = [Value(name, 8) for name in ("a", "b", "c")]
    values += [Value("t", 1, tangent=True), Value("g", 1), Value("h", 1, output="backward")]
    problem = Problem(
        tuple(values),
        (
            Op("f0", "forward", (), (0,), seconds=1.0),
            Op("f1", "forward", (0,), (1,), seconds=1.0),
            Op("f2", "forward", (1,), (2,), seconds=1.0),
            Op("b2", "backward", (3, 2), (4,), seconds=1.0),
            Op("b1", "backward", (4, 1, 0), (5,), seconds=1.0),
        ),
    )
    structure = Structure(problem)
    searcher = Searcher(structure)
    keep = searcher.found(Schedule.from_computes(problem, (0, 1, 2, 3, 4)))
    assert keep is not None, "five ops fit into any room"
    effort = Effort(_NO_CLOCK, 1000)
    least = searcher.lower([*searcher.seeds, keep], 0, effort)
    assert least is not None, "there are plans to lower"
    searcher.workers[0].repair(keep.ops, keep.peak, effort.part(1.0))
    searcher.improve([least], least.peak, Effort(_NO_CLOCK, 50))


def plans_without_kernels(
    structure: Structure, memory_budget: int | None, over: Callable[[], bool]
) -> Iterator[Schedule]:
    """Plans found in plain Python, until ``over()`` or there are no more.

    With ``memory_budget`` None, plans of small peak.
    """
    if memory_budget is not None:
        yield from _tightened(structure, memory_budget, over)
    for rule in Segments(structure).rules:
        if over():
            return
        held_from = [int(at) for at in rule]
        yield Schedule.from_computes(structure.problem, replay(structure.problem, held_from))


def _tightened(
    structure: Structure, memory_budget: int, over: Callable[[], bool]
) -> Iterator[Schedule]:
    """One-cut plans of ever smaller budgets, until one of them peaks within ``memory_budget``."""
    if not structure.order:
        return
    cut, target = promising_cuts(structure, 1)[0], memory_budget
    for _ in range(_ROUNDS):
        if over():
            return
        try:
            answer = one_cut(structure, target, cut, time_limit=2.0, gap=1e-2)
        except MilpFailure:
            return  # the proving thread runs the same model and reports what is wrong
        if answer.kept is None:
            return
        plan = schedule_of_cut(structure, cut, answer.kept)
        yield plan
        exceeds = simulate(structure.problem, plan).peak - memory_budget
        if exceeds <= 0:
            return
        target -= max(exceeds, memory_budget // 50)
