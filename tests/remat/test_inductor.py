"""Inductor with our partition: its halves, its caches, and the replayed peak against the truth."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from remat.cost.profile import Profiler
from remat.executors.inductor import FREE_EARLY, InductorGraph, compile_graph
from remat.executors.workspaces import MeasuredWorkspaces
from remat.executors.wrapper import StepReplay, replay_step
from remat.measurement import measure, resident_bytes
from remat.options import Options
from remat.partitioner import Ledger, partition
from remat.passes.mutation import SNAPSHOT
from remat.passes.torch_private import dynamo
from remat.passes.torch_private.partition import min_cut_partition
from remat.solvers.errors import InvalidOption
from tests.models.steps import TrainingStep, resident, train_once
from tests.models.zoo import STEPS

Partition = Callable[..., tuple[fx.GraphModule, fx.GraphModule]]

# What torch itself warns of while it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Iterator:
    """One thread, no compiled step left over, and an inductor cache that is not the user's."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch.set_num_threads(threads)


def stock(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
    return min_cut_partition(joint, inputs, options.pop("num_fwd_outputs"), SNAPSHOT, **options)


def least_peak(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
    made = partition(
        joint, inputs, Options.make(memory_budget=0.0, time_limit=0.5), Ledger(), **options
    )
    return made.forward, made.backward


def compiled(
    function: Callable[..., Any], how: Partition = stock, key: str = "", **options: Any
) -> tuple[Callable[..., Any], list[InductorGraph]]:
    """``function`` compiled through inductor, and what compiling each of its graphs gave."""
    made: list[InductorGraph] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        with dynamo.outside_compilation():
            made.append(compile_graph(graph, inputs, partition=how, key=key, **options))
        return made[-1].run

    torch._dynamo.reset()
    return torch.compile(function, backend=backend, dynamic=False, fullgraph=True), made


def replay(graph: InductorGraph, resident_size: int) -> StepReplay:
    assert graph.forward is not None
    assert graph.backward is not None
    workspaces = MeasuredWorkspaces(Profiler(torch.device("cpu")))
    found = replay_step(graph.forward, graph.backward, resident=resident_size, workspace=workspaces)
    assert workspaces.assumed == {}
    return found


def check_peak(step: TrainingStep, how: Partition, key: str) -> StepReplay:
    """The replayed peak is the measured one, to the byte."""
    run, made = compiled(step.model, how, key)

    def once() -> object:
        losses = train_once(run, step)
        step.model.zero_grad(set_to_none=True)
        return losses

    measured = measure(once, resident=resident(step))
    found = replay(made[0], resident_bytes(resident(step)))
    assert found.peak == measured.peak, str(found.where)
    return found


# Products alone need no generated kernel: these compile in a second.


def products(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return (x @ a) @ b


def matrices() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, a, b = (torch.randn(64, 64, generator=generator) for _ in range(3))
    return x, a.requires_grad_(), b.requires_grad_()


def test_both_halves_are_known_when_the_graph_is_compiled() -> None:
    x, a, b = matrices()
    run, made = compiled(products, key="halves")
    result = run(x, a, b)
    (graph,) = made
    assert graph.partitioned
    assert graph.forward is not None
    assert graph.backward is not None
    assert graph.inference is None
    assert not graph.from_cache
    assert [spec and spec.shape for spec in graph.forward.inputs] == [(64, 64)] * 3
    assert [bool(spec and spec.tangent) for spec in graph.backward.inputs][-1]
    size = 64 * 64 * 4
    found = replay(graph, 3 * size)
    # Forward: both products. Backward: saved product and the result, its gradient, and two more.
    assert found.forward_peak == 5 * size
    assert found.saved == size
    assert torch.equal(result, products(x, a, b))


def test_the_cache_gives_the_step_back_without_its_halves() -> None:
    """The same key and graph: AOTAutograd's cache; another key: planned and compiled again."""
    x, a, b = matrices()
    calls: list[str] = []

    def counted(name: str) -> Partition:
        def how(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
            calls.append(name)
            return stock(joint, inputs, **options)

        return how

    def run_with(name: str, key: str) -> InductorGraph:
        run, made = compiled(products, counted(name), key)
        run(x, a, b).sum().backward()
        return made[0]

    first, second = run_with("first", "cached"), run_with("second", "cached")
    third = run_with("third", "other")
    assert calls == ["first", "third"]
    assert (first.partitioned, first.from_cache) == (True, False)
    assert (second.partitioned, second.from_cache) == (False, True)
    assert (second.forward, second.backward) == (None, None)
    assert third.partitioned
    assert third.backward is not None


def test_donation_is_part_of_the_key_and_decides_whether_backward_may_run_twice() -> None:
    x, a, b = matrices()
    for donate, cached in ((False, False), (False, True), (True, False)):
        run, made = compiled(products, key="donation", donate=donate)
        result = run(x, a, b)
        assert made[0].from_cache == cached
        if donate:
            with pytest.raises(RuntimeError, match="donated buffer"):
                torch.autograd.grad(result.sum(), (a, b), retain_graph=True)
            continue
        once = torch.autograd.grad(result.sum(), (a, b), retain_graph=True)
        again = torch.autograd.grad(result.sum(), (a, b))
        assert all(map(torch.equal, once, again))


def test_the_graph_is_left_as_it_is() -> None:
    seen: list[tuple[str, str]] = []

    def backend(graph: fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        before = graph.code
        meta = {node.name: set(node.meta) for node in graph.graph.nodes}
        with dynamo.outside_compilation():
            made = compile_graph(graph, inputs, partition=stock, key="left alone")
        seen.append((before, graph.code))
        assert meta == {node.name: set(node.meta) for node in graph.graph.nodes}
        return made.run

    torch.compile(products, backend=backend, dynamic=False)(*matrices()).sum().backward()
    assert seen[0][0] == seen[0][1]


def test_inference_has_no_halves() -> None:
    run, made = compiled(products, key="inference")
    with torch.no_grad():
        run(*matrices())
    assert not made[0].partitioned
    assert not made[0].from_cache
    assert made[0].inference is not None
    assert made[0].forward is None


def test_a_graph_without_calls_has_a_wrapper() -> None:
    """Inductor generates none for it."""
    from remat.passes.torch_private.inductor import trivial_source

    graph = fx.Graph()
    tangent = graph.placeholder("tangents_1")
    graph.output((tangent, None, tangent))
    source = trivial_source(fx.GraphModule(nn.Module(), graph))
    assert source is not None
    args, called = ["a tensor"], {}
    exec(source, called)
    assert called["call"](args) == ("a tensor", None, "a tensor")
    assert args == []


def test_an_unknown_option_is_refused_with_its_nearest_name() -> None:
    with pytest.raises(InvalidOption, match="no option 'max_autotun'; did you mean 'max_autotune'"):
        compile_graph(
            fx.symbolic_trace(nn.Identity()), [], partition=stock, key="",
            inductor_options={"max_autotun": True},
        )  # fmt: skip
    with pytest.raises(InvalidOption, match="'cpp_wrapper' cannot be set here: remat reads"):
        compile_graph(
            fx.symbolic_trace(nn.Identity()), [], partition=stock, key="",
            inductor_options={"cpp_wrapper": True},
        )  # fmt: skip


def test_options_hold_for_one_compilation() -> None:
    from torch._functorch import config as functorch_config
    from torch._inductor import config

    held: list[bool] = []

    def how(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
        held.append(config.size_asserts)
        return stock(joint, inputs, **options)

    before = copy.copy((config.size_asserts, functorch_config.force_non_lazy_backward_lowering))
    run, made = compiled(products, how, "options", inductor_options={"size-asserts": False})
    run(*matrices()).sum().backward()
    assert held == [False]
    after = (config.size_asserts, functorch_config.force_non_lazy_backward_lowering)
    assert after == before == (True, False)
    for half in (made[0].forward, made[0].backward):
        assert half is not None
        assert "assert_size_stride(" not in half.source


def test_free_early_keeps_no_buffer_for_later() -> None:
    def chain(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return (((x @ a) @ b) @ a) @ b

    sources = []
    for options in ({}, FREE_EARLY):
        run, made = compiled(chain, key="reuse", inductor_options=options)
        with torch.no_grad():
            run(*matrices())
        assert made[0].inference is not None
        sources.append(made[0].inference.source)
    assert ["# reuse" in source for source in sources] == [True, False]


class Small(nn.Module):
    """Embedding tied to the head, dropout, batch norm, a write through a view, two losses."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.embedding(tokens)
        x = x + self.down(F.dropout(F.gelu(self.up(x)), 0.1))
        x = self.norm(x.flatten(0, 1))
        x = x * 1.0
        x[:, :4].mul_(2.0)
        logits = F.linear(x, self.embedding.weight)
        return F.cross_entropy(logits, labels.flatten()), x.square().mean()


def small() -> TrainingStep:
    torch.manual_seed(0)
    tokens = torch.randint(0, 64, (16, 64))
    return TrainingStep("small", Small().train(), (tokens, tokens.roll(1, 1)))


@pytest.mark.parametrize("how", [pytest.param(stock, marks=pytest.mark.matrix), least_peak])
def test_the_replayed_peak_is_the_measured_one(how: Partition) -> None:
    check_peak(small(), how, how.__name__)


class Twins(nn.Module):
    """Parameters in half precision, two of which get one gradient: autograd copies it."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=torch.bfloat16)
        self.one = nn.Parameter(torch.zeros(64, width, dtype=torch.bfloat16))
        self.other = nn.Parameter(torch.zeros(64, width, dtype=torch.bfloat16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.linear(x) + self.one + self.other).float().square().mean()


def test_half_precision_and_shared_gradients_are_replayed() -> None:
    torch.manual_seed(0)
    x = torch.randn(64, 64, dtype=torch.bfloat16)
    check_peak(TrainingStep("twins", Twins(), (x,)), stock, "twins")


@pytest.mark.matrix
@pytest.mark.parametrize("how", [stock, least_peak])
@pytest.mark.parametrize("name", STEPS)
def test_every_model_is_replayed(name: str, how: Partition) -> None:
    check_peak(STEPS[name](), how, how.__name__)


def test_parameters_are_known_to_stay_when_a_graph_is_compiled_again() -> None:
    """torch's partition saves them in place of views of them, at no cost."""
    seen: list[list[int]] = []

    def how(joint: fx.GraphModule, inputs: Any, **options: Any) -> tuple[Any, Any]:
        seen.append(options["static_lifetime_input_indices"])
        return stock(joint, inputs, **options)

    run, _ = compiled(nn.Linear(4, 3), how)
    run(torch.randn(2, 4)).sum().backward()
    assert [len(indices) for indices in seen] == [2]
