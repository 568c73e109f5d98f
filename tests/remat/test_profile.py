"""Workspaces: what the allocator saw inside an op, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from remat.cost.flops import wrapped_call
from remat.cost.profile import Profiler, made_up, output_bytes, signature, why_not_run
from remat.passes.allocations import Allocations

aten = torch.ops.aten
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path / "cache"))


def _node(function: Callable[..., Any], *inputs: Tensor, target: str = "") -> fx.Node:
    """The first node of ``function``'s graph that calls ``target``, or the only call."""
    graph = make_fx(function, tracing_mode="fake")(*inputs).graph
    return next(n for n in graph.nodes if n.op == "call_function" and target in str(n.target))


def _workspace(node: fx.Node) -> int:
    found = Profiler(CPU).profiles([node], timed=False)[node]
    assert found is not None
    assert found.failure is None
    return found.workspace


def test_pointwise_work_allocates_nothing_but_its_output() -> None:
    node = _node(torch.exp, torch.empty(100))
    assert output_bytes(wrapped_call(node)) == 400
    assert _workspace(node) == 0


def test_a_python_number_is_made_a_tensor_twice() -> None:
    """Eight bytes as it comes, four more in the dtype of the product."""
    assert _workspace(_node(lambda x: x * 0.5, torch.empty(100))) == 8 + 4


def test_a_cumulated_integer_is_converted_first() -> None:
    node = _node(lambda x: x.cumsum(0), torch.zeros(100, dtype=torch.bool))
    assert _workspace(node) == 100 * 8


def test_a_reduced_loss_keeps_its_terms() -> None:
    """mse_loss returns a number that lies in the storage of all the terms."""
    node = _node(
        lambda a, b: torch.nn.functional.mse_loss(a, b), torch.empty(100), torch.empty(100)
    )
    found = Profiler(CPU).profiles([node], timed=False)[node]
    assert found is not None
    assert output_bytes(wrapped_call(node)) == 4
    assert found.retained == 400 - 4


def _convolution(x: Tensor, w: Tensor) -> Tensor:
    return torch.conv2d(x, w, padding=1)


def test_layouts_are_told_apart() -> None:
    x, w = torch.empty(2, 8, 16, 16), torch.empty(8, 8, 3, 3)
    plain = _node(_convolution, x, w)
    last = _node(_convolution, x.to(memory_format=torch.channels_last), w)
    assert signature(wrapped_call(plain)) != signature(wrapped_call(last))
    args, _ = made_up(wrapped_call(last))
    assert args[0].is_contiguous(memory_format=torch.channels_last)
    assert _workspace(plain) >= 0
    assert _workspace(last) >= 0


def test_made_up_arguments_have_shape_strides_and_dtype() -> None:
    x = torch.empty(4, 6).t()[::2].expand(5, 3, 4)
    node = _node(lambda a, i: torch.add(a, i), x, torch.empty(4, dtype=torch.int32))
    (real, indices), _ = made_up(wrapped_call(node))
    assert (real.shape, real.stride(), real.dtype) == (x.shape, x.stride(), x.dtype)
    assert real.untyped_storage().nbytes() == 4 * (1 + 2 * 2 + 3 * 6)  # the expansion takes none
    assert torch.equal(real, torch.full_like(real, 0.5))
    assert torch.equal(indices, torch.zeros(4, dtype=torch.int32))


def test_the_same_tensor_twice_is_made_once() -> None:
    node = _node(lambda x: x @ x, torch.empty(4, 4))
    args, _ = made_up(wrapped_call(node))
    assert args[0] is args[1]
    other = _node(lambda x, y: x @ y, torch.empty(4, 4), torch.empty(4, 4))
    assert signature(wrapped_call(node)) != signature(wrapped_call(other))


def test_a_refusing_op_is_reported_not_guessed() -> None:
    """A matrix of halves has no Cholesky factor."""
    node = _node(lambda x: torch.linalg.cholesky_ex(x, check_errors=True)[0], torch.eye(4))
    found = Profiler(CPU).profiles([node], timed=True)[node]
    assert found is not None
    assert found.failure is not None
    assert "not positive-definite" in found.failure
    assert found.seconds is None


def test_only_known_operators_are_run() -> None:
    ran: list[int] = []

    def python_function(x: Tensor) -> Tensor:
        ran.append(1)
        return x

    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(3)
    node = graph.call_function(python_function, (x,))
    node.meta["val"] = torch.empty(3)
    found = Profiler(CPU).profiles([node], timed=False)[node]
    assert found is not None
    assert found.failure == "it is no operator of torch"
    collective = graph.call_function(torch.ops._c10d_functional.all_reduce.default, (x, "sum", "0"))
    assert "may do more than compute" in str(why_not_run(wrapped_call(collective)))
    assert ran == []


def test_an_op_larger_than_memory_is_not_tried() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    with torch._subclasses.FakeTensorMode():
        x.meta["val"] = torch.empty(2**60, dtype=torch.uint8)
        node = graph.call_function(aten.neg.default, (x,))
        node.meta["val"] = torch.empty(2**60, dtype=torch.uint8)
    found = Profiler(CPU).profiles([node], timed=False)[node]
    assert found is not None
    assert f"take {2**61} bytes" in str(found.failure)


def test_random_numbers_are_left_as_they_were() -> None:
    node = _node(lambda x: torch.native_dropout(x, 0.5, True), torch.empty(64))
    before = torch.get_rng_state()
    assert _workspace(node) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_modes_of_the_caller_do_not_matter() -> None:
    """Fake tensors, proxies, autocast, a default device and a profiler, all at once."""
    x, w = torch.empty(2, 8, 16, 16), torch.empty(8, 8, 3, 3)
    node = _node(_convolution, x, w)
    plain = Profiler(CPU).profiles([node], timed=False)[node]
    found: list[Any] = []

    def traced(a: Tensor) -> Tensor:
        profiler = Profiler(CPU)
        profiler._store._values.clear()
        found.append(profiler.profiles([node], timed=False)[node])
        return a + 1

    with (
        profile(activities=[ProfilerActivity.CPU], profile_memory=True),
        torch.autocast("cpu", dtype=torch.bfloat16),
        torch.device("meta"),
    ):
        make_fx(torch.func.functionalize(traced), tracing_mode="fake")(torch.ones(3, device="cpu"))
    assert found == [plain]
    assert plain is not None
    assert plain.failure is None


def test_figures_are_remembered_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    node = _node(lambda x: x * 0.5, torch.empty(100))
    first = Profiler(CPU).profiles([node], timed=True)[node]

    def fail(*_: Any) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(Profiler, "_measure", fail)
    assert Profiler(CPU).profiles([node], timed=True)[node] == first
    assert first is not None
    assert first.seconds is not None


def test_an_untimed_figure_is_timed_when_asked() -> None:
    node = _node(lambda x: x * 0.5, torch.empty(100))
    profiler = Profiler(CPU)
    untimed = profiler.profiles([node], timed=False)[node]
    timed = profiler.profiles([node], timed=True)[node]
    assert untimed is not None
    assert timed is not None
    assert untimed.seconds is None
    assert timed.seconds is not None
    assert timed.workspace == untimed.workspace


def test_nothing_runs_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    node = _node(lambda x: x * 0.5, torch.empty(100))
    assert Profiler(CPU).profiles([node], timed=False, run=False) == {node: None}


def test_ops_are_run_with_the_callers_number_of_threads() -> None:
    """oneDNN's scratchpads grow with the threads, and a new thread starts with OpenMP's own."""
    x, weight = torch.randn(4, 16, 64), torch.randn(16, 8, 4)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:

        def run(x: Tensor, weight: Tensor) -> Tensor:
            return aten.convolution(x, weight, None, [2], [0], [1], True, [0], 1)

        run(x, weight)
        with Allocations(CPU) as watch:
            result = run(x, weight)
        output = result.untyped_storage().nbytes()
        node = _node(run, x, weight, target="convolution")
        assert output + _workspace(node) == watch.peak
    finally:
        torch.set_num_threads(threads)
