"""Offloaded values come back bit for bit, in time, and leave nothing behind."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from remat.measurement import measure
from remat.passes import tiers, transfers
from remat.passes.disk import Disk
from remat.passes.lower import Lowered
from remat.passes.offload import TRANSFER, Place
from remat.passes.split import split
from remat.passes.verify import verify_split
from remat.solvers.errors import RematError
from remat.solvers.problem import Link
from remat.solvers.schedule import Schedule, Step, with_frees
from remat.solvers.simulate import simulate
from tests.passes.joints import Captured, capture, compile_with
from tests.passes.offloads import offload, offloadable, random_offload
from tests.passes.plans import random_schedule
from tests.passes.test_split import Everything, outcome

LINK = Link(1e9, 1e9)
CPU = torch.device("cpu")


class Later(Future[None]):
    """A job that runs when somebody asks whether it has ended, or when the queue lets it."""

    def __init__(self, job: Callable[[], None]) -> None:
        super().__init__()
        self.job = job

    def run(self) -> None:
        if not self.done():
            try:
                self.job()
            except RematError as error:
                self.set_exception(error)
            else:
                self.set_result(None)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.run()
        return super().exception(timeout)


class Slow:
    """A queue whose jobs run as late as can be, or, some of them, at random before."""

    def __init__(self, rng: random.Random, soon: float) -> None:
        self.rng, self.soon = rng, soon
        self.pending: list[Later] = []

    def submit(self, function: Callable[..., None], /, *args: Any) -> Future[None]:
        self.pending.append(Later(lambda: self._in_order(len_before, function, args)))
        len_before = len(self.pending) - 1
        while self.pending and self.rng.random() < self.soon:
            self.rng.choice(self.pending).run()
        return self.pending[-1]

    def _in_order(self, before: int, function: Callable[..., None], args: tuple[Any, ...]) -> None:
        for job in self.pending[:before]:
            job.run()
        function(*args)


class Poisoned(Disk):
    """Memory that is to be filled holds what nobody could take for a value: NaNs."""

    def read(self, room: Any, memory: torch.Tensor) -> Any:
        memory.fill_(0xFF)
        return super().read(room, memory)


@pytest.fixture
def slow(tmp_path: Path) -> tuple[Place, Poisoned]:
    rng = random.Random(0)
    tier = Poisoned(str(tmp_path), lambda name: Slow(rng, 0.3))
    tiers.put_in_place("slow", CPU, tier)
    return Place("slow"), tier


@functools.cache
def everything() -> Captured:
    return capture(Everything(), torch.randn(32, 16, requires_grad=True))


def pair(
    planner: Callable[[Lowered, Schedule], Schedule], place: Place
) -> tuple[list[torch.Tensor], Callable[..., Any], Everything, torch.Tensor]:
    """(what is wanted, a compiled model that follows the planner, the model, its input)."""
    torch.manual_seed(0)
    x = torch.randn(32, 16, requires_grad=True)
    plain, ours = Everything(), Everything()
    ours.load_state_dict(plain.state_dict())
    want = outcome(plain, plain, x)
    run, _ = compile_with(ours, planner, place=place)
    return want, run, ours, x


def same(want: list[torch.Tensor], got: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


def all_offloaded(lowered: Lowered, baseline: Schedule) -> Schedule:
    problem = lowered.problem
    schedule = offload(problem, baseline, offloadable(problem, baseline))
    simulate(problem, schedule, LINK)
    return schedule


def transfers_of(module: fx.GraphModule, op: str) -> list[fx.Node]:
    wanted = getattr(torch.ops.remat, op).default
    return [node for node in module.graph.nodes if node.target is wanted]


@pytest.mark.parametrize("seed", range(2))
def test_random_transfers_give_the_same_bits(seed: int, slow: tuple[Place, Poisoned]) -> None:
    rng = random.Random(seed)

    def planner(lowered: Lowered, baseline: Schedule) -> Schedule:
        problem = lowered.problem
        if seed % 2:
            baseline = random_schedule(problem, rng, keep=0.9, forget=0.0)
        values = [v for v in offloadable(problem, baseline) if rng.random() < 0.8]
        assert values
        schedule = random_offload(problem, baseline, values, rng)
        simulate(problem, schedule, LINK)
        return schedule

    want, run, ours, x = pair(planner, slow[0])
    assert same(want, outcome(run, ours, x))
    assert transfers.stored_count() == 0


def test_a_reader_without_its_wait_is_caught(slow: tuple[Place, Poisoned]) -> None:
    """Were an edge missing, nobody would be told: so graphs are checked, and so is this test."""
    captured = everything()
    schedule = all_offloaded(captured.lowered, captured.baseline)
    forward, backward = split(captured.lowered, schedule, slow[0])
    for op, module in (("wait_offload", forward), ("wait_reload", backward)):
        waits = transfers_of(module, op)
        assert waits
        module.graph.erase_node(waits[0])
        with pytest.raises(RematError, match=r"before its reload has|steps that transfer"):
            verify_split(captured.lowered, schedule, forward, backward)


class Chain(nn.Module):
    """Activations that dominate: each layer saves two of them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(32, 32) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return x.square().mean()


def chain(place: Place | None, **options: Any) -> tuple[Chain, torch.Tensor, Any, list[Any]]:
    torch.manual_seed(0)
    model, x = Chain(), torch.randn(512, 32)
    run, seen = compile_with(
        model, (lambda lowered, baseline: baseline) if place is None else all_offloaded, place=place
    )
    return model, x, run, seen


def test_without_its_edge_a_gradient_is_wrong(
    slow: tuple[Place, Poisoned], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, run, _ = chain(slow[0])
    run(x).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.zero_grad()
    monkeypatch.setattr(transfers.Stored, "finish_reading", lambda self, value: None)
    run(x).backward()
    assert any(p.grad is not None and p.grad.isnan().any() for p in model.parameters())


def test_the_peak_falls_as_planned(tmp_path: Path) -> None:
    measured, planned = [], []
    for place in (None, Place(str(tmp_path))):
        model, x, run, seen = chain(place)

        def step(model: Chain = model, x: torch.Tensor = x, run: Any = run) -> None:
            run(x).backward()
            model.zero_grad()

        measured.append(measure(step, resident=(model, x), warmup=2).graph)
        problem = seen[0].lowered.problem
        planned.append(simulate(problem, seen[0].schedule, LINK).peak)
    # Without offloading, the loss's own numbers are alive at the peak; with it, they are not.
    assert abs(measured[0] - planned[0]) <= 16
    assert measured[1] == planned[1]
    assert measured[1] < 0.6 * measured[0]


def test_values_are_stored_once_a_step_and_the_file_does_not_grow(tmp_path: Path) -> None:
    _, x, run, seen = chain(Place(str(tmp_path)))
    tier = tiers.tier_for(str(tmp_path), CPU)
    assert isinstance(tier, Disk)
    ends = []
    for _ in range(3):
        loss = run(x)
        assert transfers.stored_count() == len(
            offloadable(seen[0].lowered.problem, seen[0].baseline)
        )
        loss.backward()
        assert transfers.stored_count() == 0
        ends.append(tier.file.end)
    assert ends[0] == ends[2] > 0
    assert list(tmp_path.iterdir()) == []


def test_several_forwards_have_their_own(tmp_path: Path) -> None:
    model, x, run, _ = chain(Place(str(tmp_path)))
    inputs = [x, 2 * x, -x]
    want = []
    for given in inputs:
        model.zero_grad()
        model(given).backward()
        want.append([p.grad.clone() for p in model.parameters()])
    losses = [run(given) for given in inputs]
    for index in (1, 0, 2):
        model.zero_grad()
        losses[index].backward()
        assert same(want[index], [p.grad for p in model.parameters()])
    del losses
    assert transfers.stored_count() == 0


def test_retained_graphs_are_read_again(tmp_path: Path) -> None:
    model, x, run, _ = chain(Place(str(tmp_path)))
    loss, found = run(x), []
    for _ in range(3):
        model.zero_grad()
        loss.backward(retain_graph=True)
        found.append([p.grad.clone() for p in model.parameters()])
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert transfers.stored_count() > 0
    del loss
    assert transfers.stored_count() == 0


def test_a_backward_that_fails_leaves_nothing(tmp_path: Path) -> None:
    _, x, run, _ = chain(Place(str(tmp_path)))

    def fail(_: torch.Tensor) -> None:
        raise ValueError("from a hook")

    loss = run(x)
    held = loss.register_hook(fail)
    with pytest.raises(ValueError, match="from a hook"):
        loss.backward()
    held.remove()
    assert transfers.stored_count() > 0
    del loss
    assert transfers.stored_count() == 0
    run(x).backward()


def test_a_graph_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    _, x, run, _ = chain(Place(str(tmp_path)))
    run(x)
    gc.collect()
    assert transfers.stored_count() == 0


def full(*_: Any) -> int:
    raise OSError(28, "No space left on device")


def test_a_full_disk_ends_the_step_in_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, run, _ = chain(Place(str(tmp_path)))
    with monkeypatch.context() as patch:
        patch.setattr("os.pwrite", full)
        with pytest.raises(RematError, match=r"writing .* failed: .*No space left on device") as e:
            run(x)
    assert str(tmp_path) in str(e.value)
    assert "are free there: make room" in str(e.value)
    del e
    gc.collect()
    assert transfers.stored_count() == 0
    run(x).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("way", ["short", "broken"])
def test_what_cannot_be_read_ends_backward(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x, run, _ = chain(Place(str(tmp_path)))
    loss = run(x)

    def preadv(*_: Any) -> int:
        if way == "broken":
            raise OSError(5, "Input/output error")
        return 0

    with monkeypatch.context() as patch:
        patch.setattr("os.preadv", preadv)
        match = "Input/output error" if way == "broken" else "the file ends .* bytes too early"
        with pytest.raises(RematError, match=f"reading .* failed: .*{match}"):
            loss.backward()
    assert all(p.grad is None for p in model.parameters())


def test_a_token_that_was_copied_away_is_named(tmp_path: Path) -> None:
    _, x, run, _ = chain(Place(str(tmp_path)))
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        loss = run(x)
    with pytest.raises(RematError, match="something copied what the compiled step saves"):
        loss.backward()


@pytest.mark.cuda
@pytest.mark.parametrize("where", ["host", "disk"])
def test_values_of_a_cuda_device_come_back(where: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Chain().cuda(), torch.randn(512, 32, device="cuda")
    place = Place(str(tmp_path) if where == "disk" else where)
    run, _ = compile_with(model, all_offloaded, place=place)
    for _ in range(3):
        model.zero_grad()
        model(x).backward()
        want = [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
        run(x).backward()
        assert same(want, [p.grad for p in model.parameters()])
        assert transfers.stored_count() == 0


def test_a_schedule_that_offloads_needs_a_place() -> None:
    captured = everything()
    schedule = all_offloaded(captured.lowered, captured.baseline)
    with pytest.raises(RematError, match="there is no place to offload to"):
        split(captured.lowered, schedule)


def test_what_nobody_made_in_forward_stays() -> None:
    """Parameters, inputs, outputs, gradients, states, and what is written in place."""
    lowered = everything().lowered
    problem = lowered.problem
    for v, value in enumerate(problem.values):
        if value.offloadable:
            op = problem.ops[problem.producer[v]]
            assert op.phase == "forward"
            assert not value.owned
            assert value.output is None
            assert "random_state" not in value.name
    assert sum(value.offloadable for value in problem.values) > 5


def test_every_emitted_transfer_says_its_step(slow: tuple[Place, Poisoned]) -> None:
    captured = everything()
    schedule = all_offloaded(captured.lowered, captured.baseline)
    parts = split(captured.lowered, schedule, slow[0])
    found = [n.meta[TRANSFER] for part in parts for n in part.graph.nodes if TRANSFER in n.meta]
    assert found == [s for s in schedule.steps if s.kind in ("offload", "reload", "wait")]


def test_instances_are_freed_after_their_last_use() -> None:
    captured = everything()
    problem = captured.lowered.problem
    assert with_frees(problem, captured.baseline.steps) == captured.baseline
    v = offloadable(problem, captured.baseline)[0]
    steps = offload(problem, captured.baseline, [v]).steps
    own = [step.kind for step in steps if step.kind != "compute" and step.index == v]
    assert own == ["offload", "wait", "free", "reload", "wait", "free"]
    assert Step("wait", v) in steps


def test_a_place_has_no_name_to_collide(tmp_path: Path) -> None:
    """Two models of one process share a file, not a room."""
    first, second = chain(Place(str(tmp_path))), chain(Place(str(tmp_path)))
    losses = [run(x) for _, x, run, _ in (first, second)]
    for loss in losses:
        loss.backward()
    pairs = zip(first[0].parameters(), second[0].parameters(), strict=True)
    assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
    assert transfers.stored_count() == 0
