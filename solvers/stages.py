"""Forward as a chain of stages, and what each stage costs: what ``chain`` optimises over.

Where a single value separates what came before from what comes after, forward can be cut. Between
two cuts lies a stage. Its *inner* values are those backward needs; the rest of what it makes is
gone when its last forward reader has run. Backward is cut into *windows*, one a stage, last stage
first: the window of stage k begins with the first backward op that needs an inner value of it, or
the cut it starts from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import networkx as nx
import numpy as np

from remat.solvers.demand import always_kept
from remat.solvers.problem import Problem
from remat.solvers.segments import lifetimes, replay


@dataclass(frozen=True)
class Stages:
    """Forward contracted to a chain: ``cuts[k]`` is the only value between stage k and stage k + 1.

    Attributes:
        cuts: the values that separate the stages, in order.
        ops: for each stage its forward ops, in program order.
    """

    cuts: tuple[int, ...]
    ops: tuple[tuple[int, ...], ...]


def contract(problem: Problem, removed: Collection[int] = ()) -> Stages:
    """Contract forward at the values whose removal separates its first ops from its last.

    Such a value is an articulation point, on the longest path, of the undirected graph of forward
    ops and values: what hangs on one side only (a cast of a parameter, a statistic) does not blur
    it, as it would blur a dominator. Ops that are not connected with the longest path (those that
    only make ``removed`` values, say) belong to no stage.

    Args:
        removed: values to leave out of the graph. Owned ones always are, and those should be that
            every plan keeps but many stages read.
    """
    flow = _forward_graph(problem, removed)
    path = nx.dag_longest_path(flow) if flow else []
    skeleton = flow.to_undirected()
    block = {
        frozenset(edge): number
        for number, edges in enumerate(nx.biconnected_component_edges(skeleton))
        for edge in edges
    }
    count = len(problem.ops)
    cuts = [
        node - count
        for before, node, after in zip(path, path[1:], path[2:], strict=False)
        if node >= count and block[frozenset((before, node))] != block[frozenset((node, after))]
    ]
    return Stages(tuple(cuts), _stage_ops(problem, skeleton, cuts, path))


def _forward_graph(problem: Problem, removed: Collection[int]) -> nx.DiGraph:
    """Ops are nodes i, values are nodes len(ops) + v."""
    flow, count = nx.DiGraph(), len(problem.ops)
    for index in problem.forward:
        op = problem.ops[index]
        flow.add_node(index)
        for v in op.reads:
            if not problem.values[v].owned and v not in removed:
                flow.add_edge(count + v, index)
        for v in op.writes:
            if v not in removed:
                flow.add_edge(index, count + v)
    return flow


def _stage_ops(
    problem: Problem, skeleton: nx.Graph, cuts: Sequence[int], path: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    count = len(problem.ops)
    stage_of_cut = {v: k for k, v in enumerate(cuts)}
    pieces = skeleton.copy()
    pieces.remove_nodes_from([count + v for v in cuts])
    stages: list[list[int]] = [[] for _ in range(len(cuts) + 1)]
    on_path = set(path)
    for piece in nx.connected_components(pieces):
        ops = [node for node in piece if node < count]
        touched = [stage_of_cut[v] for i in ops for v in problem.ops[i].writes if v in stage_of_cut]
        touched += [
            stage_of_cut[v] + 1 for i in ops for v in problem.ops[i].reads if v in stage_of_cut
        ]
        if not touched and not cuts and piece & on_path:
            touched = [0]
        if touched:
            stages[min(touched)] += ops
    return tuple(tuple(sorted(ops)) for ops in stages)


@dataclass(frozen=True)
class Stage:
    """What one stage takes. Peaks are bytes over those named, workspaces included.

    Attributes:
        cut: the value it hands to the next stage, or -1.
        cut_bytes: of that, 0 if every plan keeps it anyway.
        inner, inner_bytes: values backward needs, besides the cuts.
        pass_seconds, pass_peak, pass_peak_input: recompute the cut alone; the peak over what is
            alive, without the cut it starts from and with it (then it dies on the way).
        all_seconds, all_peak: recompute the cut and the inner values, without the input.
        inner_seconds, inner_peak: recompute the inner values alone, without the input.
        forward_pass_peak, forward_pass_peak_input, forward_all_peak: the same three in forward
            itself, whatever no plan can change included: total bytes.
        begins: the position at which its window begins.
        base: bytes alive just before its window, whatever the plan.
        held_over: ``cut_bytes`` if its own window reads the cut too.
        window_peak: total bytes at the worst op of its window, its input left out.
    """

    cut: int
    cut_bytes: int
    inner: tuple[int, ...]
    inner_bytes: int
    pass_seconds: float
    pass_peak: int
    pass_peak_input: int
    all_seconds: float
    all_peak: int
    inner_seconds: float
    inner_peak: int
    forward_pass_peak: int
    forward_pass_peak_input: int
    forward_all_peak: int
    begins: int
    base: int
    held_over: int
    window_peak: int


def measure(problem: Problem, stages: Stages) -> tuple[list[Stage], list[int]]:
    """Each stage's figures, and the values they speak of: those a plan may drop."""
    survey = _Survey(problem, stages)
    droppable = [v for v, free in enumerate(survey.droppable) if free]
    return [survey.stage(k) for k in range(len(stages.ops))], droppable


class _Survey:
    """One walk over save-all, split in what every plan holds and what a plan may drop."""

    def __init__(self, problem: Problem, stages: Stages) -> None:
        self.problem, self.stages = problem, stages
        kept = always_kept(problem)
        self.stage_of = {index: k for k, ops in enumerate(stages.ops) for index in ops}
        self.droppable = [
            problem.producer[v] in self.stage_of and not kept[v] for v in range(len(kept))
        ]
        self.computes = replay(problem, [0] * len(kept))
        self.place = {index: place for place, index in enumerate(self.computes)}
        # Where in ``computes`` each position begins: with the deferred ops it demands first.
        ends = [self.place[index] + 1 for index in problem.backward]
        self.start = [len(problem.forward), *ends, len(self.computes)]
        self._find_windows()
        self._weigh_the_rest()

    def _find_windows(self) -> None:
        """``window``: the stage each position works on; ``last_need``: of each value, or -1."""
        problem, end = self.problem, len(self.problem.backward)
        cut_number = {v: k for k, v in enumerate(self.stages.cuts)}
        self.last_need = [-1] * len(problem.values)
        lowest = [len(self.stages.ops) - 1] * (end + 1)
        for position in range(end + 1):
            for index in self.computes[self.start[position] : self.start[position + 1]]:
                for v in filter(self.droppable.__getitem__, problem.ops[index].reads):
                    self.last_need[v] = position
                    home = self.stage_of[problem.producer[v]]
                    home = cut_number[v] + 1 if v in cut_number else home
                    lowest[position] = min(lowest[position], home)
        self.window = list(accumulate(lowest, min))
        stage_count = len(self.stages.ops)
        self.begins = [
            next((p for p in range(end) if self.window[p] <= k), end) for k in range(stage_count)
        ]

    def _weigh_the_rest(self) -> None:
        """Bytes no plan can avoid: ``rest`` while each place runs, ``before`` just before it."""
        problem, count = self.problem, len(self.computes)
        self.rest = np.full(count + 1, problem.fixed_bytes, np.int64)
        self.before = self.rest.copy()
        self.rest[:count] += [problem.ops[index].workspace for index in self.computes]
        stays_for = [-1] * len(problem.values)
        for index, k in reversed(self.stage_of.items()):
            for v in problem.ops[index].reads:
                stays_for[v] = self.start[self.begins[k]]  # it may be recomputed from it there
        for v, first, last in lifetimes(problem, self.computes):
            size = problem.values[v].bytes
            if not self.droppable[v]:
                last = max(last, stays_for[v])
                self.rest[first : last + 1] += size
                self.before[first + (not problem.values[v].tangent) : last + 1] += size
        cuts = {v: k for k, v in enumerate(self.stages.cuts)}
        for v, position in enumerate(self.last_need):
            if position < 0:
                continue
            counted = cuts[v] if v in cuts else self.stage_of[problem.producer[v]]
            if self.window[position] < counted:  # backward comes back to it after its own window
                span = slice(self.start[self.begins[counted - 1]], self.start[position + 1])
                self.rest[span] += problem.values[v].bytes
                self.before[span] += problem.values[v].bytes

    def stage(self, k: int) -> Stage:
        """The figures of stage ``k``."""
        values, ops = self.problem.values, self.stages.ops[k]
        cut = self.stages.cuts[k] if k < len(self.stages.cuts) else -1
        entering = self.stages.cuts[k - 1] if k and self.droppable[self.stages.cuts[k - 1]] else -1
        cut_bytes = values[cut].bytes if cut >= 0 and self.droppable[cut] else 0
        made = [v for index in ops for v in self.problem.ops[index].writes]
        inner = [v for v in made if self.droppable[v] and v != cut and self.last_need[v] >= 0]
        to_cut, to_inner = self._needed_for([cut], k), self._needed_for(inner, k)
        to_all = sorted({*to_cut, *to_inner})
        held_over = cut_bytes if cut >= 0 and self.last_need[cut] >= self.begins[k] else 0
        return Stage(
            cut=cut,
            cut_bytes=cut_bytes,
            inner=tuple(inner),
            inner_bytes=sum(values[v].bytes for v in inner),
            pass_seconds=self._seconds(to_cut),
            pass_peak=self._peak(to_cut, {cut}),
            pass_peak_input=self._peak(to_cut, {cut}, entering),
            all_seconds=self._seconds(to_all),
            all_peak=self._peak(to_all, {cut, *inner}),
            inner_seconds=self._seconds(to_inner),
            inner_peak=self._peak(to_inner, set(inner)),
            forward_pass_peak=self._peak(ops, {cut}, in_forward=True),
            forward_pass_peak_input=self._peak(ops, {cut}, entering, in_forward=True),
            forward_all_peak=self._peak(ops, {cut, *inner}, in_forward=True),
            begins=self.begins[k],
            base=int(self.before[self.start[self.begins[k]]]),
            held_over=held_over,
            window_peak=self._window_peak(k, [*inner, cut] if held_over else inner),
        )

    def _needed_for(self, wanted: Iterable[int], k: int) -> list[int]:
        """Ops of stage ``k`` to run for ``wanted``, given the cut it starts from."""
        found: set[int] = set()
        stack = [v for v in wanted if v >= 0]
        while stack:
            v = stack.pop()
            index = self.problem.producer[v]
            if self.droppable[v] and self.stage_of[index] == k and index not in found:
                found.add(index)
                stack += self.problem.ops[index].reads
        return sorted(found)

    def _seconds(self, ops: Iterable[int]) -> float:
        return math.fsum(self.problem.ops[index].seconds for index in ops)

    def _peak(
        self, ops: Sequence[int], stay: set[int], entering: int = -1, in_forward: bool = False
    ) -> int:
        """Most bytes while ``ops`` run, if ``stay`` outlives them and ``entering`` is there.

        In forward the bytes no plan can avoid are added; what every plan keeps is among them, while
        a recomputation makes a second instance of it.
        """
        problem = self.problem
        last = {v: index for index in ops for v in (*problem.ops[index].writes,)}
        last |= {entering: -1} if entering >= 0 else {}
        for index in ops:
            last.update((v, index) for v in problem.ops[index].reads if v in last)
        alive = problem.values[entering].bytes if entering >= 0 else 0
        peak = 0
        for index in ops:
            op = problem.ops[index]
            new = sum(problem.values[v].bytes for v in op.writes if self.droppable[v])
            second = sum(problem.values[v].bytes for v in op.writes) - new
            other = int(self.rest[self.place[index]]) if in_forward else op.workspace + second
            peak = max(peak, alive + new + other)
            dead = {v for v in (*op.reads, *op.writes) if last.get(v) == index and v not in stay}
            alive += new - sum(problem.values[v].bytes for v in dead if self.droppable[v])
        return peak

    def _window_peak(self, k: int, values: Sequence[int]) -> int:
        """Most bytes at a position of window ``k`` if ``values`` live to their last need."""
        dying = np.zeros(len(self.window) + 1, np.int64)
        for v in values:
            dying[self.last_need[v]] += self.problem.values[v].bytes
        alive = np.cumsum(dying[::-1])[::-1]
        return max(
            (
                int(self.rest[self.start[p] : self.start[p + 1]].max() + alive[p])
                for p, stage in enumerate(self.window)
                if stage == k and self.start[p] < self.start[p + 1]
            ),
            default=0,
        )
