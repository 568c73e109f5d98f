"""The CUDA graph executor on a CPU: everything but the raw calls, by a recorder that runs again."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.cost import link
from remat.executors import cudagraph
from remat.executors.cudagraph_capture import IN_FLIGHT, Captured
from remat.passes.torch_private.capturing import borrowed
from remat.passes.transfers import stored_count
from remat.pooled import in_pool
from remat.solvers.errors import BudgetTooSmall, CaptureError, InvalidOption, RematError
from remat.solvers.problem import Link
from tests.remat.conftest import BASELINE, PROBLEM, RECOMPUTES_A
from tests.remat.tape import FakeRecorder

pytestmark = pytest.mark.filterwarnings("ignore:.*TypedStorage is deprecated.*:UserWarning")


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> FakeRecorder:
    """Stands for torch's recorder, whatever the device."""
    fake = FakeRecorder()
    monkeypatch.setattr(cudagraph, "check_device", lambda inputs: torch.device("cpu"))
    monkeypatch.setattr(cudagraph, "CudaRecorder", lambda device: fake)
    monkeypatch.setattr(cudagraph, "DEVICE_TYPE", "cpu")
    return fake


def doubles(fake: FakeRecorder, **options: Any) -> tuple[Captured, Tensor]:
    weight = torch.tensor([1.0, 2.0])

    def run(given: list[Any]) -> list[Any]:
        x, w = given
        given.clear()
        return [x * w, w, x]

    return Captured(run, [False, True], fake, 0, **options), weight


def test_a_graph_is_warmed_up_then_recorded_then_replayed() -> None:
    fake = FakeRecorder()
    captured, w = doubles(fake)
    results = []
    for factor in range(1, 5):
        x = torch.full((2,), float(factor))
        product, same, passed = captured([x, w])
        assert torch.equal(product, x * w)
        assert same is w
        assert passed is x
        results.append(product)
    assert (fake.warmed, fake.recorded_in, fake.replayed) == (1, [0], 3)
    # What was returned before is not written over.
    assert [r[0].item() for r in results] == [1.0, 2.0, 3.0, 4.0]
    assert captured.copied_bytes == 8


def test_a_parameter_that_moves_is_refused() -> None:
    captured, w = doubles(FakeRecorder(), name="forward", warm=True)
    captured([torch.ones(2), w])
    w.mul_(2)
    assert torch.equal(captured([torch.ones(2), w])[0], w)
    with pytest.raises(RematError, match=r"input 1 of forward \(shape \(2,\)\) has moved"):
        captured([torch.ones(2), w.clone()])


def test_inputs_that_are_written_are_written_back() -> None:
    def run(given: list[Any]) -> list[Any]:
        given[0].add_(given[1])
        return []

    captured = Captured(run, [False, False], FakeRecorder(), 0, written=frozenset({0}), warm=True)
    x = torch.zeros(2)
    for _ in range(3):
        captured([x, torch.ones(2)])
    assert torch.equal(x, torch.full((2,), 3.0))


def test_expanded_inputs_and_outputs_are_copied() -> None:
    def run(given: list[Any]) -> list[Any]:
        x = given.pop()
        return [x * 2, x.sum().expand(3)]

    captured = Captured(run, [False], FakeRecorder(), 0, warm=True)
    for factor in (1.0, 2.0, 3.0):
        doubled, sums = captured([torch.full((1, 2), factor).expand(3, 2)])
        assert torch.equal(doubled, torch.full((3, 2), 2 * factor))
        assert torch.equal(sums, torch.full((3,), 6 * factor))
        assert sums.stride() == (0,)


def test_borrowed_memory_is_not_kept() -> None:
    owner = torch.arange(6.0).reshape(2, 3).t()
    alias = borrowed(owner)
    assert torch.equal(alias, owner)
    owner.add_(1)
    assert torch.equal(alias, owner)
    assert alias.untyped_storage()._cdata != owner.untyped_storage()._cdata


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.norm(x).square().mean()


def compiled(net: nn.Module, **options: Any) -> Callable[..., Any]:
    return remat.compile(
        net, executor="cudagraph", time_limit=0.2, cost="roofline", on_unplanned="ignore", **options
    )


def test_forward_and_backward_are_recorded_in_one_pool(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Captured] = []

    def watched(*args: Any, **options: Any) -> Captured:
        made.append(Captured(*args, **options))
        return made[-1]

    monkeypatch.setattr(cudagraph, "Captured", watched)
    net = Net()
    twin = copy.deepcopy(net)
    run = compiled(net, memory_budget=0.5)
    for _ in range(4):
        x = torch.randn(32, 16)
        loss, wanted = run(x), twin(x)
        assert torch.equal(loss, wanted)
        loss.backward()
        wanted.backward()
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
        for ours, theirs in zip(net.buffers(), twin.buffers(), strict=True):
            assert torch.equal(ours, theirs)
    assert recorder.recorded_in == [1, 1]
    # Only the batch is copied, and the gradient of the loss.
    assert [captured.copied_bytes for captured in made] == [32 * 16 * 4, 4]
    assert run.plans[0].executor == "cudagraph"
    assert run.plans[0].replayed_peak > run.plans[0].predicted


def test_microbatches_in_flight_have_pools_of_their_own(recorder: FakeRecorder) -> None:
    net = Net()
    twin = copy.deepcopy(net)
    run = compiled(net)
    for _ in range(3):
        batches = [torch.randn(8, 16) for _ in range(3)]
        losses, wanted = [run(x) for x in batches], [twin(x) for x in batches]
        for ours, theirs in zip(reversed(losses), reversed(wanted), strict=True):
            ours.backward()
            theirs.backward()
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.allclose(ours.grad, theirs.grad, atol=1e-6)
    assert recorder.pools == 3
    assert sorted(recorder.recorded_in) == [1, 1, 2, 2, 3, 3]


def test_too_many_in_flight_and_dropped_ones(recorder: FakeRecorder) -> None:
    run, x = compiled(Net()), torch.randn(8, 16)
    for _ in range(2 * IN_FLIGHT):
        run(x)  # dropped at once: nobody waits
    assert recorder.pools == 1
    held = [run(x) for _ in range(IN_FLIGHT)]
    with pytest.raises(RematError, match="4 forwards wait for their backward"):
        run(x)
    held[0].backward()
    run(x).backward()


def test_a_second_backward_is_refused(recorder: FakeRecorder) -> None:
    run, x = compiled(Net()), torch.randn(8, 16)
    for _ in range(2):
        run(x).backward()
    loss = run(x)
    loss.backward(retain_graph=True)
    with pytest.raises(RematError, match="a second backward through one forward"):
        loss.backward()
    run(x).backward()


def test_an_argument_that_a_step_writes_into_may_be_another_one(recorder: FakeRecorder) -> None:
    w = torch.nn.Parameter(torch.ones(4))

    def step(x: Tensor, state: Tensor) -> Tensor:
        loss = (w * x + state).square().sum()
        (gradient,) = torch.autograd.grad(loss, w)
        state.copy_(gradient)
        return loss

    run = remat.compile_step(step, executor="cudagraph", cost="roofline", time_limit=0.2)
    for _ in range(4):
        x, state = torch.randn(4), torch.randn(4)
        twin = state.clone()
        assert torch.equal(run(x, state), step(x, twin).detach())
        assert torch.equal(state, twin)


def test_a_generator_of_the_callers_is_registered(recorder: FakeRecorder) -> None:
    w = torch.nn.Parameter(torch.ones(4))

    def step(generator: torch.Generator) -> Tensor:
        noise = torch.rand(4, generator=generator)
        return torch.autograd.grad((w * noise).square().sum(), w)[0]

    run = remat.compile_step(step, executor="cudagraph", cost="roofline", time_limit=0.2)
    ours, plain = (torch.Generator().manual_seed(3) for _ in range(2))
    for _ in range(5):
        assert torch.equal(run(ours), step(plain))
    (known,) = recorder.generators  # perhaps another Python object of the same generator
    assert torch.equal(known.get_state(), ours.get_state())
    ours.manual_seed(9)
    assert known.initial_seed() == 9


def test_a_recording_that_failed_is_forgotten(
    recorder: FakeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its forward has lent went with it: the pool is not used again."""
    net = Net()
    twin = copy.deepcopy(net)
    run = compiled(net, memory_budget=0.5)
    record, fails = recorder.record, [False, True]

    def failing(function: Callable[[], Any], pool: Any) -> Any:
        if fails and fails.pop(0):
            raise RematError("recording a CUDA graph failed")
        return record(function, pool)

    monkeypatch.setattr(recorder, "record", failing)
    x = torch.randn(32, 16)
    for net_, call in ((net, run), (twin, twin)):
        call(x).backward()
        loss = call(x)
        if net_ is net:
            with pytest.raises(RematError, match="recording a CUDA graph failed"):
                loss.backward()
    for _ in range(3):
        net.zero_grad()
        twin.zero_grad()
        run(x).backward()
        twin(x).backward()
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    assert recorder.recorded_in == [1, 2, 2]


def test_a_whole_step_is_recorded(recorder: FakeRecorder) -> None:
    net = Net()
    twin = copy.deepcopy(net)

    def training(model: nn.Module) -> Callable[..., Any]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def step(x: Tensor) -> Tensor:
            loss = model(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        return step

    run = remat.compile_step(
        training(net), executor="cudagraph", memory_budget=0.5, time_limit=0.2, cost="roofline"
    )
    plain = training(twin)
    for _ in range(5):
        x = torch.randn(32, 16)
        assert torch.equal(run(x), plain(x))
        for ours, theirs in zip(net.state_dict().values(), twin.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)
    # The first step makes the momenta and is another graph, run once.
    assert (recorder.warmed, len(recorder.recorded_in), recorder.replayed) == (2, 1, 3)


@pytest.fixture
def fast_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """Host memory takes values of a CPU, at no cost: nothing is computed again instead."""
    monkeypatch.setattr(link, "find_link", lambda where, spec: Link(1e15, 1e15))


@pytest.mark.usefixtures("fast_link")
def test_a_whole_step_is_recorded_with_what_it_offloads(recorder: FakeRecorder) -> None:
    net = Net()
    twin = copy.deepcopy(net)

    def training(model: nn.Module) -> Callable[..., Any]:
        def step(x: Tensor) -> Tensor:
            loss = model(x)
            gradients = torch.autograd.grad(loss, list(model.parameters()))
            with torch.no_grad():
                for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                    parameter.sub_(gradient, alpha=0.1)
            return loss

        return step

    options = {"memory_budget": 0.0, "time_limit": 0.2, "cost": "roofline", "offload": "host"}
    run = remat.compile_step(training(net), executor="cudagraph", **options)
    plain = training(twin)
    for _ in range(4):
        x = torch.randn(64, 16)
        assert torch.equal(run(x), plain(x))
        for ours, theirs in zip(net.state_dict().values(), twin.state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)
    (plan,) = run.plans
    assert plan.offloaded_bytes > 0
    assert plan.offload == "host"
    assert (len(recorder.recorded_in), recorder.replayed, len(recorder.tiers)) == (1, 3, 1)
    assert stored_count() == 0


@pytest.mark.usefixtures("fast_link")
def test_copies_begun_in_forward_are_joined_before_its_recording_ends(
    recorder: FakeRecorder,
) -> None:
    net = Net()
    twin = copy.deepcopy(net)
    run = compiled(net, memory_budget=0.0, offload="host")
    for _ in range(4):
        batches = [torch.randn(64, 16) for _ in range(2)]
        losses = [run(x) for x in batches]  # two in flight: each has rooms of its own
        wanted = [twin(x) for x in batches]
        for loss, expected in zip(losses, wanted, strict=True):
            assert torch.equal(loss, expected)
            loss.backward()
            expected.backward()
        for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours.grad, theirs.grad)
    (plan,) = run.plans
    assert plan.offloaded_bytes > 0
    assert (recorder.recorded_in, len(recorder.tiers)) == ([1, 2, 1, 2], 2)
    held = stored_count()
    assert held > 0  # what is recorded keeps its rooms
    del run, loss, losses
    gc.collect()
    torch._dynamo.reset()
    gc.collect()
    assert stored_count() == 0


def test_what_a_recording_cannot_offload_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="cannot write files"):
        remat.compile(Net(), executor="cudagraph", offload=tmp_path)


def test_gradients_that_a_step_drops_may_lie_anywhere(recorder: FakeRecorder) -> None:
    """``zero_grad`` comes first, so every step is given the gradients of the one before."""
    w = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([w], lr=0.5)

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        (w * x).sum().backward()
        optimizer.step()

    run = remat.compile_step(step, executor="cudagraph", time_limit=0.2, cost="roofline")
    for k in range(5):
        run(torch.full((2,), float(k)))
        assert w.grad.tolist() == [k, k]
    assert w.tolist() == [-4.0, -4.0]
    assert recorder.replayed == 3


def test_what_cannot_be_recorded_is_refused_by_name(recorder: FakeRecorder) -> None:
    w = nn.Parameter(torch.randn(8))

    def step(x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad((w * x).sum(), w)
        return torch.index_put(gradient, (x > 0,), x.sum())

    run = remat.compile_step(
        lambda x: step(x).sum(), executor="cudagraph", state=(), cost="roofline"
    )
    with pytest.raises(CaptureError, match="indexes by a mask"):
        run(torch.randn(8))


def test_on_a_machine_without_cuda_it_says_so() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(
        CaptureError, match=r"records CUDA graphs, and the step is on the cpu: .*h100"
    ):
        compiled(Net())(torch.randn(8, 16))
    step = remat.compile_step(lambda w: torch.autograd.grad(w.sum(), w), executor="cudagraph")
    with pytest.raises(CaptureError, match="records CUDA graphs"):
        step(torch.ones(2, requires_grad=True))


def test_a_plan_for_a_gpu_counts_the_pool() -> None:
    net, x = (
        nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.1), nn.Linear(64, 64)),
        torch.randn(512, 64),
    )
    options = dict(loss=lambda y: y.square().mean(), device="h100", time_limit=0.2)
    eager = remat.plan(net, (x,), executor="eager", **options)
    plan = remat.plan(net, (x,), executor="cudagraph", **options)
    assert plan.replayed_peak == plan.peak >= eager.peak + (1 << 20)
    assert (plan.peak - plan.problem.fixed_bytes) % 512 == 0
    with pytest.raises(BudgetTooSmall, match="with the rounding of its pool"):
        remat.plan(net, (x,), executor="cudagraph", memory_budget=eager.peak, **options)


def test_a_plan_says_what_cannot_be_recorded() -> None:
    w = nn.Parameter(torch.randn(8))

    def step(x: Tensor) -> Tensor:
        (gradient,) = torch.autograd.grad((w * x).sum(), w)
        return torch.index_put(gradient, (x > 0,), x.sum())

    run = remat.compile_step(step, executor="cudagraph", device="h100")
    (note,) = [n for n in run.plan(torch.randn(8)).notes if "cannot be recorded" in n]
    assert "aten.index_put.default" in note
    assert "test_cudagraph.py" in note


def test_a_budget_is_tightened_by_what_the_pool_takes_more(solution: Any) -> None:
    asked: list[int] = []

    def solve(budget: int) -> Any:
        asked.append(budget)
        raise BudgetTooSmall("no", memory_budget=budget, least_peak=1, peak_lower_bound=1)

    pool = 2 << 20
    found = in_pool(PROBLEM, solution, 1004 + pool, solve, static=0, is_fraction=False)
    assert found == (solution, 1004 + pool, 1004 + pool)
    assert asked == []
    with pytest.raises(BudgetTooSmall, match="at the least that was found"):
        in_pool(PROBLEM, solution, 1000 + pool, solve, static=0, is_fraction=False)
    assert asked == [996 + pool]
    _, peak, budget = in_pool(PROBLEM, solution, 1450, solve, static=0, is_fraction=True)
    assert peak == budget == 1004 + pool
    assert BASELINE != RECOMPUTES_A


def test_with_options_of_inductors_the_trees_record() -> None:
    options = remat.Options.make(executor="cudagraph", inductor={"max_autotune": True})
    planned = cudagraph.as_planned(options)
    assert planned.executor == "inductor"
    assert planned.inductor == {"max_autotune": True, "triton.cudagraphs": True}
    with pytest.raises(InvalidOption, match="cudagraph trees"):
        remat.Options.make(executor="cudagraph", offload=True, inductor={})
