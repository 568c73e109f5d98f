"""The measured peak of a step: exact to the byte."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers.modeling_outputs import CausalLMOutput

from remat.measurement import measure, resident_bytes
from remat.solvers.errors import InvalidOption, RematError


def test_a_step_by_hand() -> None:
    """Two matrices of 1 MiB each are alive at once; the first is freed before the third."""
    a = torch.zeros(512, 512)

    def step() -> torch.Tensor:
        b = torch.neg(a)
        c = torch.neg(b)
        del b
        return torch.neg(c)

    measured = measure(step, a)
    mib = 2**20
    assert (measured.resident, measured.graph, measured.peak) == (mib, 2 * mib, 3 * mib)
    assert int(measured) == 3 * mib
    assert [level // mib for _, level in measured.timeline] == [2, 3, 2, 3, 2]
    assert measured.reserved is None
    assert str(measured).startswith("peak 3.00 MiB = 1.00 MiB resident + 2.00 MiB in the call")


def test_warm_up_calls_are_made_and_not_watched() -> None:
    calls: list[int] = []
    lazily: list[torch.Tensor] = []

    def step() -> None:
        calls.append(1)
        if not lazily:
            lazily.append(torch.empty(1000))

    measured = measure(step, lazily, warmup=2)
    assert (measured.graph, measured.resident) == (0, 4000)
    assert len(calls) == 3
    measured = measure(step, lazily, warmup=0)
    assert (measured.graph, measured.resident) == (0, 4000)
    lazily.clear()
    assert measure(step, (), warmup=0).graph == 4000


def test_gradients_left_by_the_warm_up_are_resident_and_their_release_is_seen() -> None:
    layer = nn.Linear(100, 100, bias=False)
    batch = torch.ones(1, 100)

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        layer(batch).sum().backward()

    measured = measure(step, (layer, batch))
    assert measured.resident == 40_000 + 40_000 + 400
    # The old gradient goes before the new one comes: never two at once. Beyond them there are the
    # output, its sum, and the gradient of the sum.
    assert measured.peak == measured.resident + 400 + 4 + 4


def test_accumulation_holds_a_second_gradient_for_a_moment() -> None:
    layer = nn.Linear(100, 100, bias=False)
    batch = torch.ones(1, 100)
    measured = measure(lambda: layer(batch).sum().backward(), (layer, batch))
    assert measured.graph >= 40_000


def test_optimizer_state_is_resident() -> None:
    layer = nn.Linear(10, 10)
    optimizer = torch.optim.Adam(layer.parameters())

    def step() -> None:
        optimizer.zero_grad()
        layer(torch.ones(1, 10)).sum().backward()
        optimizer.step()

    measure(step)
    parameters = 440
    steps = 2 * 4  # one counter a parameter
    # Parameter, gradient, two moments. The module adds nothing the optimizer did not bring.
    assert resident_bytes(optimizer) == 4 * parameters + steps
    assert resident_bytes((layer, optimizer)) == 4 * parameters + steps
    assert resident_bytes(layer) == 2 * parameters


class _Colour(enum.Enum):
    RED = 1


@dataclass
class _Batch:
    images: torch.Tensor
    labels: list[torch.Tensor]
    name: str = "batch"


class _Plain:
    def __init__(self) -> None:
        self.cache = {"key": torch.empty(4)}
        self.self = self


def test_tensors_are_found_wherever_they_are() -> None:
    tensor = torch.empty(4)
    assert resident_bytes(tensor) == 16
    assert resident_bytes([tensor, (tensor, {"again": tensor})]) == 16
    assert resident_bytes(_Batch(torch.empty(2), [torch.empty(3)])) == 20
    assert resident_bytes(CausalLMOutput(logits=torch.empty(6))) == 24
    assert resident_bytes(_Plain()) == 16
    assert resident_bytes([None, 1, "text", b"bytes", _Colour.RED, torch.float32, True]) == 0
    assert resident_bytes(torch.empty(4, device="meta")) == 0


def test_a_storage_counts_once_and_whole() -> None:
    base = torch.empty(1000)
    assert resident_bytes([base[:10], base[500:].view(50, 10)]) == 4000
    tied = nn.Linear(8, 8, bias=False)
    other = nn.Linear(8, 8, bias=False)
    other.weight = tied.weight
    assert resident_bytes([tied, other]) == 256


def test_buffers_count_even_those_that_are_not_saved() -> None:
    module = nn.Module()
    module.register_buffer("mask", torch.empty(16), persistent=False)
    assert resident_bytes(module) == 64


def test_parts_of_a_sparse_tensor() -> None:
    indices, values = torch.tensor([[0, 2]]), torch.tensor([1.0, 2.0])
    sparse = torch.sparse_coo_tensor(indices, values, (3,), check_invariants=True)
    assert resident_bytes(sparse) == 2 * 8 + 2 * 4


@pytest.mark.parametrize("thing", [print, _Plain, (i for i in range(3))])
def test_what_cannot_hold_tensors_is_refused(thing: object) -> None:
    with pytest.raises(InvalidOption, match="cannot look for tensors in"):
        resident_bytes((thing,))


def test_negative_warm_up_is_refused() -> None:
    with pytest.raises(InvalidOption, match="warmup is -1"):
        measure(lambda: None, warmup=-1)


def test_a_running_profiler_is_named() -> None:
    with (
        profile(activities=[ProfilerActivity.CPU]),
        pytest.raises(RematError, match="a torch profiler is already running"),
    ):
        measure(lambda: None)


def test_eager_and_recorded_training_agree() -> None:
    """Two measured calls of one step are the same to the byte."""
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 1))
    batch = torch.randn(16, 32)

    def step() -> None:
        model.zero_grad()
        model(batch).sum().backward()

    first, second = measure(step, (model, batch)), measure(step, (model, batch))
    assert first.peak == second.peak
    assert [level for _, level in first.timeline] == [level for _, level in second.timeline]


@pytest.mark.cuda
def test_cuda_peak_and_reserved() -> None:
    batch = torch.zeros(512, 512, device="cuda")
    measured = measure(lambda: (batch + 1) * 2, batch)
    assert measured.peak == 3 * 2**20
    assert measured.reserved is not None
    assert measured.reserved >= measured.peak
