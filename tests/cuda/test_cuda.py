"""What only a CUDA device can tell. Skipped where there is none; see docs/cuda.md."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.executors.cudagraph_pool import Pool
from remat.passes.attention import Attention, Capability, choose_kernel
from remat.solvers.errors import CaptureError, RematError

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.filterwarnings("ignore:This instance was constructed with capturable=True"),
    # What deterministic mode says of cuBLAS, and of ops that have no such kernel.
    pytest.mark.filterwarnings("ignore:.*CUBLAS_WORKSPACE_CONFIG"),
    pytest.mark.filterwarnings("ignore:.*does not have a deterministic implementation"),
]
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    torch._dynamo.reset()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.cuda.empty_cache()


class Net(nn.Module):
    """A chain wide enough for its activations to matter."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(6))
        self.norm, self.drop = nn.LayerNorm(1024), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.drop(torch.tanh(layer(self.norm(x))))
        return x.square().mean()


def batch() -> Tensor:
    return torch.randn(4096, 1024, device="cuda")


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("budget", [0.5, 0.0])
def test_the_eager_executor_keeps_its_budget_and_the_gradients(budget: float) -> None:
    net, x = Net().cuda(), batch()
    twin = copy.deepcopy(net)
    run = remat.compile(net, memory_budget=budget, executor="eager", time_limit=2)

    def step() -> None:
        net.zero_grad(set_to_none=True)
        run(x).backward()

    measured = remat.measure(step, (net, x), warmup=3)
    plan = run.plans[0]
    assert measured.peak <= plan.peak <= plan.baseline_peak
    assert measured.peak >= 0.97 * plan.peak
    twin(x).backward()
    for ours, theirs in zip(gradients(net), gradients(twin), strict=True):
        assert torch.equal(ours, theirs)


def test_recorded_forward_and_backward_give_the_gradients() -> None:
    net = Net().cuda()
    twin = copy.deepcopy(net)
    run = remat.compile(net, memory_budget=0.5, executor="cudagraph", time_limit=2)
    for _ in range(4):
        x = batch()
        net.zero_grad(set_to_none=True)
        twin.zero_grad(set_to_none=True)
        loss, wanted = run(x), twin(x)
        loss.backward()
        wanted.backward()
        assert torch.equal(loss, wanted)
        for ours, theirs in zip(gradients(net), gradients(twin), strict=True):
            assert torch.equal(ours, theirs)


def test_recorded_forwards_in_flight_and_a_second_backward() -> None:
    net, x = Net().cuda(), batch()
    twin = copy.deepcopy(net)
    run = remat.compile(net, executor="cudagraph")
    for _ in range(3):
        for model, call in ((net, run), (twin, twin)):
            model.zero_grad(set_to_none=True)
            losses = [call(x * factor) for factor in (1, 2)]
            for loss in losses:
                loss.backward()
    for ours, theirs in zip(gradients(net), gradients(twin), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    loss = run(x)
    loss.backward(retain_graph=True)
    with pytest.raises(RematError, match="a second backward"):
        loss.backward()


def training(model: nn.Module) -> Callable[[Tensor], Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False, capturable=True)

    def step(x: Tensor) -> Tensor:
        loss = model(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


@pytest.mark.parametrize("executor", ["eager", "cudagraph"])
def test_a_whole_step_trains_like_the_plain_one(executor: str) -> None:
    net = Net().cuda()
    twin = copy.deepcopy(net)
    run = remat.compile_step(
        training(net), executor=executor, memory_budget=0.5, time_limit=2, cost="roofline"
    )
    plain = training(twin)
    for _ in range(5):
        x = batch()
        assert torch.allclose(run(x), plain(x), rtol=1e-5)
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("whole", [True, False])
def test_recorded_copies_to_host_memory_bring_back_the_bits(whole: bool) -> None:
    net = Net().cuda()
    twin = copy.deepcopy(net)
    options = {"executor": "cudagraph", "memory_budget": 0.0, "offload": "host", "time_limit": 2}
    if whole:
        run = remat.compile_step(training(net), **options)
        plain = training(twin)
        for _ in range(5):
            x = batch()
            assert torch.allclose(run(x), plain(x), rtol=1e-5)
    else:
        run = remat.compile(net, on_unplanned="ignore", **options)
        for _ in range(5):
            x = batch()
            run(x).backward()
            twin(x).backward()
    for ours, theirs in zip(net.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-4, atol=1e-6)
        if not whole:
            assert torch.allclose(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)
    assert run.plans[-1].offloaded_bytes > 0


def test_the_memory_of_a_recorded_step_is_what_was_predicted() -> None:
    net, x = Net().cuda(), batch()
    run = remat.compile_step(training(net), executor="cudagraph", time_limit=2, cost="roofline")
    for _ in range(4):
        run(x)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    plan = run.plans[-1]
    # cuBLAS keeps a workspace of its own for the recording stream.
    assert torch.cuda.memory_reserved() <= plan.peak + 64 * MIB + 0.05 * plan.peak
    assert torch.cuda.memory_reserved() >= 0.9 * plan.peak


def test_dropout_differs_from_replay_to_replay() -> None:
    net, x = Net(dropout=0.5).cuda(), batch()
    run = remat.compile_step(training(net), executor="cudagraph", memory_budget=0.3, time_limit=2)
    with torch.no_grad():
        weights = [p.clone() for p in net.parameters()]
    losses = []
    for _ in range(6):
        losses.append(float(run(x)))
        with torch.no_grad():
            for p, w in zip(net.parameters(), weights, strict=True):
                p.copy_(w)
    assert len(set(losses)) == len(losses)


def test_a_number_on_the_host_is_refused() -> None:
    net = Net().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)  # counts its steps on the host

    def step(x: Tensor) -> Tensor:
        loss = net(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = remat.compile_step(step, executor="cudagraph", cost="roofline")
    with pytest.raises(CaptureError, match="capturable=True"):
        run(batch())


def test_the_pool_on_paper_is_the_pool() -> None:
    """Random allocations in the private pool of a recording, and in the model of it."""
    rng = random.Random(0)
    sizes = [rng.choice((700, 40_000, MIB, 3 * MIB, 11 * MIB, 30 * MIB)) for _ in range(60)]
    paper, held = Pool(), dict[int, tuple[int, Tensor]]()
    one = torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    with torch.cuda.graph(graph):
        one.add_(1)  # an empty recording is warned of
        for index, size in enumerate(sizes):
            held[index] = (
                paper.allocate(size),
                torch.empty(size, dtype=torch.uint8, device="cuda"),
            )
            if index % 3 == 2:
                # Nothing may hold the tensor any longer than the paper does.
                paper.release(held.pop(rng.choice(list(held)))[0])
        reserved = torch.cuda.memory_reserved() - before
    assert reserved == paper.reserved


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("width", [40, 64, 66, 128, 192, 256])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.1, 0.125])
def test_attention_is_routed_as_torch_does(
    dtype: torch.dtype, width: int, masked: bool, dropout: float
) -> None:
    torch.use_deterministic_algorithms(False)
    q, k, v = (
        torch.randn(2, 4, 128, width, dtype=dtype, device="cuda", requires_grad=True)
        for _ in range(3)
    )
    mask = torch.zeros(128, 128, dtype=dtype, device="cuda") if masked else None
    here = Capability(torch.cuda.get_device_capability(), torch.backends.cudnn.version() or 0)
    names = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn"}
    wanted = names[torch._fused_sdp_choice(q, k, v, mask, dropout, not masked)]
    call = Attention(q, k, v, mask, dropout, causal=not masked)
    assert choose_kernel(call, here) == wanted
