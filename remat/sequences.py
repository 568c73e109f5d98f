"""Which plan a call runs with: the sequences of calls that are known, and the one that is followed.

The first step of a new sequence runs with least-peak plans while it is recorded. Its budget is
shared when it comes again, so from then on the budget holds for the whole step; that step is
watched too, and where it was seen to hold other bytes beside the graphs, it is shared anew.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Literal

import torch

from remat.graphs import GraphRunner, moving_bytes
from remat.joined import Phase
from remat.known import Known
from remat.measurement import resident_tensors
from remat.options import Options
from remat.passes.storages import main_device
from remat.plans import Plan, Unplanned
from remat.sharing import Recorded, peak_of_step, share
from remat.solvers.errors import BudgetTooSmall
from remat.solvers.units import format_bytes
from remat.step_plan import StepPlan
from remat.steps import Step

MOST_SEQUENCES: Final = 8
_MOST_SHARES: Final = 2
_FEWEST_WATCHES: Final = 2  # of a single graph: in the first step nothing is left of one before
_MOST_WATCHES: Final = 8
_SLACK: Final = 0.02  # of the budget: so much less is beside the graphs than thought, share anew


class Sequences:
    """The steps of one session, where they may be several graph calls.

    Attributes:
        several: whether some step of this session was, or is bound to be.
        plan: how the latest step that was planned as a whole shares its budget.
    """

    def __init__(self, options: Options, owner: object, say: Callable[[Unplanned], None]) -> None:
        self.options, self.owner, self.say = options, owner, say
        self.several = False
        self.plan: StepPlan | None = None
        self.step: Step | None = None
        self._finished = 0
        self._known: list[Known] = []
        self._lone: dict[GraphRunner, Known] = {}
        self._watches: Counter[GraphRunner] = Counter()
        self._given: Sequence[torch.Tensor] = ()
        self._returned: list[weakref.ref[torch.Tensor]] = []
        self._latest: Known | None = None
        self._follow: Known | None = None
        self._following: StepPlan | None = None
        self._changed: str | None = None
        self._gave_up = False
        self._leaves: dict[int, weakref.ref[torch.Tensor]] = {}
        self._device = torch.device("cpu")

    @property
    def finished(self) -> bool:
        """Whether some step has ended."""
        return self._finished > 0

    @property
    def waiting(self) -> bool:
        """Whether a call of the step waits for its backward."""
        return self.step is not None and self.step.waiting

    def enter(self, inputs: Sequence[torch.Tensor]) -> None:
        """The compiled callable is called: unless calls wait, a step begins."""
        self._given = inputs
        if not self.waiting:
            self._begin(inputs)

    def leave(self, *, failed: bool) -> None:
        """It has returned, or failed: without a call of a graph there is nothing to watch."""
        self._given = ()
        if self.step is not None and (failed or not self.step.calls):
            self.step.forget()

    def choose(self, runner: GraphRunner, inputs: Sequence[Any]) -> Plan | Literal["alone"] | None:
        """What a call has to run with; None: the least there is."""
        tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
        if self.step is None or (self.step.calls and not self.waiting):
            self._begin(tensors)
        step = self.step
        assert step is not None
        at = len(step.calls)
        if at == 0 and not self.several:
            return self._choose_lone(step, runner, inputs)
        if not self.several:
            self._discover(step)
        if at == 0:
            self._find(step, runner)
        elif self._follow is not None and not self._matches(at, runner):
            self._deviate(step, runner)
        # What a graph is given and nothing has computed was there when the step began.
        self._see(step, [tensor for tensor in tensors if tensor.is_leaf])
        return self._place(at)

    def returned(self, result: Any) -> None:
        """A call has returned ``result``, which the caller may keep for longer than the step."""
        if not self.several:
            tensors = result if isinstance(result, tuple | list) else (result,)
            self._returned = [weakref.ref(t) for t in tensors if isinstance(t, torch.Tensor)]

    def _choose_lone(
        self, step: Step, runner: GraphRunner, inputs: Sequence[Any]
    ) -> Plan | Literal["alone"] | None:
        """A graph that is the whole step, as far as one knows, but for code outside it."""
        tensors = [item for item in inputs if isinstance(item, torch.Tensor)]
        step.inputs = [weakref.ref(tensor) for tensor in tensors]
        step.moving = runner.moving(inputs)
        step.interrupt()  # solving is no part of the step
        known = self._lone.get(runner)
        chosen = "alone" if known is None else self._plan_lone(known, runner, step.moving, inputs)
        if not self._watches_lone(known, runner, step.moving):
            step.forget()
        elif step.levels is None:
            self._record(step, tensors, self._still_there(tensors))
        else:
            step.resume()
            self._see(step, [tensor for tensor in tensors if tensor.is_leaf])
        return chosen

    def _plan_lone(
        self, known: Known, runner: GraphRunner, moving: int, inputs: Sequence[Any]
    ) -> Plan | Literal["alone"] | None:
        if moving not in known.alone:
            known.alone[moving] = not known.shared and self._suffices(
                known, runner, moving, runner.alone(inputs).plan
            )
        if known.alone[moving]:
            return "alone"
        self._follow, self._following = known, self._shared(known, moving)
        self.plan = self._following or self.plan
        return self._place(0)

    @staticmethod
    def _suffices(known: Known, runner: GraphRunner, moving: int, plan: Plan | Unplanned) -> bool:
        """Whether a plan made for the graph alone keeps the budget in the whole step."""
        if isinstance(plan, Unplanned) or plan.memory_budget is None:
            return True
        latest = list(known.recorded.values())[-1]
        peak = peak_of_step(plan, latest.phases)
        if plan.peak < peak <= plan.memory_budget:
            runner.remark(moving, peak)
        return peak <= plan.memory_budget

    def _watches_lone(self, known: Known | None, runner: GraphRunner, moving: int) -> bool:
        if self._watches[runner] == _MOST_WATCHES:
            return False
        if known is not None and self._follow is known:
            return not known.settled(moving)
        return known is None or len(known.recorded) == 0 or self._watches[runner] < _FEWEST_WATCHES

    def _still_there(self, inputs: Iterable[torch.Tensor]) -> int:
        """Bytes that the latest call returned and the caller still holds."""
        known = {tensor.untyped_storage()._cdata for tensor in (*inputs, *self._given)}
        alive = [tensor for ref in self._returned if (tensor := ref()) is not None]
        sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in alive}
        return sum(size for storage, size in sizes.items() if storage not in known)

    def _place(self, at: int) -> Plan | None:
        if self._follow is None or self._following is None or at not in self._follow.planned:
            return None
        return self._following.plans[self._follow.planned.index(at)]

    def over(self, plan: Plan, excess: int) -> int:
        """Bytes by which the step is over its budget, where the code generated for ``plan``, in
        the place of the call to come, takes ``excess`` bytes more.
        """
        assert self.step is not None
        assert self._follow is not None
        assert plan.memory_budget is not None
        call = self._follow.planned.index(len(self.step.calls))
        more = max(0, excess - self._follow.excess[call])  # the rest has been given room
        return max(0, plan.peak + more - plan.memory_budget)

    def tightened(self, excess: int) -> Plan | None:
        """The plan for the call to come, with room for that much more in it."""
        step, known = self.step, self._follow
        assert step is not None
        assert known is not None
        at = len(step.calls)
        known.excess[known.planned.index(at)] = excess
        if at > 0:  # the calls before have run with more
            self._changed = (
                f"the code generated for call {at + 1} of this step takes {format_bytes(excess)} "
                "more than planned: the step before may have been over its budget by as much; the "
                "budget holds from this one on"
            )
        known.shared.clear()
        self._following = self._shared(known, step.moving)
        self.plan = self._following or self.plan
        return self._place(at)

    def _matches(self, at: int, runner: GraphRunner) -> bool:
        assert self._follow is not None
        return at < len(self._follow.graphs) and self._follow.graphs[at] is runner

    def _begin(self, inputs: Iterable[torch.Tensor]) -> None:
        self._finish()
        if self._changed is not None:
            changed, self._changed = self._changed, None
            self.say(Unplanned(changed))
        # Where a graph is the whole step, it looks itself at what is there.
        watch = self.several or self._finished == 0
        self.step = Step(self._moving(inputs) if watch else 0)
        self._follow = self._following = None
        if self._wants_recording(self.step.moving):
            self._record(self.step, inputs)

    def _wants_recording(self, moving: int) -> bool:
        if not self.several:
            return self._finished == 0
        return not self._gave_up and (self._latest is None or not self._latest.settled(moving))

    def _moving(self, inputs: Iterable[torch.Tensor]) -> int:
        self._remember_leaves(inputs)
        if self.owner is not None:
            self._remember_leaves(resident_tensors(self.owner))
        self._leaves = {key: ref for key, ref in self._leaves.items() if ref() is not None}
        alive = [leaf for ref in self._leaves.values() if (leaf := ref()) is not None]
        given = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self._given}
        return moving_bytes(alive, self.options.optimizer) + sum(given.values())

    def _remember_leaves(self, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.is_leaf and tensor.requires_grad:
                self._leaves[id(tensor)] = weakref.ref(tensor)

    def _record(self, step: Step, inputs: Iterable[torch.Tensor], level: int = 0) -> None:
        """Watch ``step`` from here on, ``level`` bytes above where it began."""
        given = (*inputs, *self._given)
        there = list(resident_tensors((given, self.owner, self.options.optimizer)))
        self._device = main_device(there)
        gc.collect()  # or the garbage of earlier steps is seen to go in this one
        step.record(self._device, level)
        self._see(step, there)

    def _see(self, step: Step, tensors: Iterable[torch.Tensor]) -> None:
        """These were there when the step began."""
        if step.levels is None:
            return
        tensors = list(tensors)
        self._remember_leaves(tensors)
        granularity = 512 if self._device.type == "cuda" else 1
        gradients = [leaf.grad for leaf in tensors if leaf.is_leaf and leaf.grad is not None]
        for tensor in (*tensors, *resident_tensors(gradients)):  # some are sparse
            if tensor.device.type == self._device.type:
                storage = tensor.untyped_storage()
                size = -(-storage.nbytes() // granularity) * granularity
                step.sizes.setdefault(storage._cdata, size)

    def _discover(self, step: Step) -> None:
        """A second call in a step of what was thought to be a single graph."""
        self.several = True
        first = step.calls[0]
        held = first.plan.kept_bytes
        returned = sum(v.bytes for v in first.plan.problem.values if v.output == "forward")
        waiting = sum(call.waits for call in step.calls)
        if self._finished > 0:
            self.say(
                Unplanned(
                    f"{waiting} earlier forward{'s' * (waiting > 1)} of this graph still wait for "
                    "backward, which had not happened before: the budget was that of one forward "
                    "and backward at a time. It is shared over these calls from the next step on; "
                    "or call backward() after each forward"
                )
            )
        step.moving = self._moving(step.given)
        if step.levels is not None:
            return
        step.earlier = (Phase("forward", 0, 0),)
        self._record(step, step.given, held + returned)

    def _find(self, step: Step, runner: GraphRunner) -> None:
        """Follow the latest known sequence that begins so."""
        latest = [] if self._latest is None else [self._latest]
        for known in (*latest, *self._known[::-1]):
            if known.graphs[0] is runner:
                self._latest = self._follow = known
                step.interrupt()  # solving is no part of the step
                self._following = self._shared(known, step.moving)
                self.plan = self._following or self.plan
                break
        else:
            self._latest = None
            if self._known and runner.calls > 1:
                self._say_changed(step)
        if not self._wants_recording(step.moving):
            step.forget()
        elif step.levels is None:
            self._record(step, ())
        else:
            step.resume()

    def _shared(self, known: Known, moving: int) -> StepPlan | None:
        """The plans for a sequence; None where they have to wait for a recording of their own."""
        if moving in known.shared:
            return known.shared[moving]
        if moving in known.recorded:
            recorded = known.recorded[moving]
            starts = list(known.shared.values())
            allowing = known.allowing(recorded)
            known.shared[moving] = share(allowing, recorded.resident, self.options, starts)
            return known.shared[moving]
        moves = self.options.budget.kind == "fraction"
        for other, plan in known.shared.items():
            change = moving - other
            if moves or plan.peak + change <= plan.memory_budget:
                known.shared[moving] = plan.shifted(change, budget_too=moves)
                return known.shared[moving]
        for other, recorded in known.recorded.items():
            try:
                resident = recorded.resident + moving - other
                known.shared[moving] = share(known.allowing(recorded), resident, self.options)
            except BudgetTooSmall:  # gradients were counted as new that are there already
                return None
            return known.shared[moving]
        return None

    def _deviate(self, step: Step, runner: GraphRunner) -> None:
        follow, following = self._follow, self._following
        assert follow is not None
        self._follow = self._following = None
        if runner.calls > 1:
            self._say_changed(step)
        at = len(step.calls)
        if step.levels is not None or following is None or self._gave_up:
            return
        if len(follow.planned) < len(follow.graphs):
            return
        # The bytes so far are those of the sequence that was followed.
        phases, events = following.joined.phases, 0
        for index, phase in enumerate(phases):
            if phase.kind != "eager" and events == at:
                held = sum(following.kept_bytes(call) for call in range(at))
                step.earlier = phases[:index]
                self._record(step, (), phase.beside + held)
                step.resident_before = following.joined.problem.fixed_bytes
                return
            events += phase.kind != "eager"

    def _say_changed(self, step: Step) -> None:
        if self._gave_up:
            return
        self.say(
            Unplanned(
                f"the sequence of graph calls changed at call {len(step.calls) + 1} of this step: "
                "from there on it runs with the least-peak plans, and is planned when it comes "
                "again"
            )
        )

    def _finish(self) -> None:
        """The step is over: learn from it."""
        step, self.step = self.step, None
        if step is None or not step.calls:
            if step is not None:
                step.forget()
            return
        self._finished += 1
        if not self.several:
            if step.levels is not None:
                self._learn_lone(step)
            return
        seen = step.phases()
        known = next((k for k in self._known if k.sequence == step.sequence), None)
        if known is not None:
            self._latest = known
            if seen is not None and seen[0] == known.planned:
                self._learn(known, step, seen[1])
        elif self._follow is not None and self._follow.covers(step):
            self._latest = self._follow
        else:
            self._add(step, seen)

    def _add(self, step: Step, seen: tuple[tuple[int, ...], tuple[Phase, ...]] | None) -> None:
        if self._follow is not None:
            self._changed = (
                "the sequence of graph calls changed: backward did not run in the order of the "
                "steps before; this sequence is planned when it comes again"
            )
        self._latest = None
        if self._gave_up or seen is None:
            return
        if len(self._known) == MOST_SEQUENCES:
            self._gave_up = True
            self._changed = (
                f"the sequence of graph calls keeps changing: {MOST_SEQUENCES} are planned, and "
                "any other runs with the least-peak plans"
            )
            return
        self._latest = Known(step.sequence, seen[0])
        self._known.append(self._latest)
        self._latest.recorded[step.moving] = self._recorded(step, *seen)

    def _learn_lone(self, step: Step) -> None:
        runner = step.calls[0].graph
        assert isinstance(runner, GraphRunner)
        self._watches[runner] += 1
        seen = step.phases()
        if seen is None or len(step.calls) > 1:
            return
        known = self._lone.setdefault(runner, Known(step.sequence, seen[0]))
        if known.sequence != step.sequence or known.planned != seen[0]:
            return
        if self._follow is known:
            self._learn(known, step, seen[1])
        else:
            known.alone.clear()
            known.recorded[step.moving] = self._recorded(step, *seen)

    def _recorded(
        self, step: Step, planned: tuple[int, ...], phases: tuple[Phase, ...]
    ) -> Recorded:
        plans = tuple(step.calls[call].plan for call in planned)
        return Recorded(plans, phases, step.resident, self._device)

    def _learn(self, known: Known, step: Step, phases: tuple[Phase, ...]) -> None:
        """A known sequence was watched again."""
        moving, plan = step.moving, self._following
        recorded = known.recorded[moving] = self._recorded(step, known.planned, phases)
        if plan is None or known.shared.get(moving) is not plan:
            return
        known.watched.add(moving)
        peak = plan.peak_beside(known.allowing(recorded).phases, recorded.resident)
        computes_again = plan.solution.schedule != plan.baseline
        slack = computes_again and peak < plan.peak - _SLACK * plan.memory_budget
        if peak <= plan.memory_budget and not slack:
            return
        if known.shares[moving] < _MOST_SHARES:
            known.shared.pop(moving)
            known.shares[moving] += 1
            if peak > plan.memory_budget:
                known.watched.discard(moving)
        elif peak > plan.memory_budget:
            self._changed = (
                f"the step peaked at {format_bytes(peak)}, above its budget of "
                f"{format_bytes(plan.memory_budget)}: what is alive beside the graphs differs from "
                "step to step; leave that much more room"
            )
