"""A sequence of calls that was seen to its end, and the plans that were made for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from remat.graphs import GraphRunner
from remat.sharing import Recorded
from remat.step_plan import StepPlan
from remat.steps import Step


@dataclass
class Known:
    """A sequence of calls that was seen to its end.

    Attributes:
        sequence: the graphs that were called, and the order of forwards and backwards.
        planned: which calls can be planned.
        recorded: by the bytes of gradients and optimizer state when it began.
        shared: the plans, likewise.
        shares: how often plans were made again because of what was seen, likewise.
        watched: for which of them a step with the latest plans was watched.
        alone: of a single graph: for which of them its own plan keeps the budget in the whole step.
        excess: for each planned call, the bytes that its generated code takes beyond its plan.
    """

    sequence: tuple[Any, ...]
    planned: tuple[int, ...]
    recorded: dict[int, Recorded] = field(default_factory=dict)
    shared: dict[int, StepPlan] = field(default_factory=dict)
    shares: Counter[int] = field(default_factory=Counter)
    watched: set[int] = field(default_factory=set)
    alone: dict[int, bool] = field(default_factory=dict)
    excess: Counter[int] = field(default_factory=Counter)

    @property
    def graphs(self) -> tuple[GraphRunner, ...]:
        graphs: tuple[GraphRunner, ...] = self.sequence[0]
        return graphs

    def allowing(self, recorded: Recorded) -> Recorded:
        """``recorded``, with room beside every call for its ``excess``."""
        phases = (replace(p, beside=p.beside + self.excess[p.call]) for p in recorded.phases)
        return replace(recorded, phases=tuple(phases))

    def settled(self, moving: int) -> bool:
        """Whether nothing more has to be watched."""
        return moving in self.watched

    def covers(self, step: Step) -> bool:
        """Whether ``step`` is this sequence, or its first calls alone, nested alike.

        Fewer calls wait in it at every moment, so what keeps the budget here keeps it there.
        """
        graphs, events = step.sequence
        inside = tuple(event for event in self.sequence[1] if event[1] < len(graphs))
        return bool(graphs == self.graphs[: len(graphs)] and events == inside)
