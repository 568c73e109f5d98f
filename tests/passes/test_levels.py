"""Marks in a recording of the allocator, some of them left inside a backward."""

from __future__ import annotations

import pytest
import torch

from remat.passes.levels import Levels
from remat.passes.torch_private import autograd, profiling

SIZE = 256 * 256 * 4


def tensor() -> torch.Tensor:
    return torch.empty(256, 256)


def test_levels_and_peaks_between_marks() -> None:
    levels = Levels(torch.device("cpu"), level=100)
    assert levels.start()
    levels.mark()
    held = tensor()
    del held
    held = tensor()
    levels.mark()
    del held
    levels.stop()
    assert [(s.level, s.peak) for s in levels.segments] == [
        (100, 100 + SIZE),
        (100 + SIZE, 100 + SIZE),
    ]
    assert not profiling.is_profiling()


def test_what_is_allocated_in_an_interruption_is_not_counted() -> None:
    levels = Levels(torch.device("cpu"))
    levels.start()
    levels.mark()
    first = tensor()
    levels.stop()
    second = tensor()
    levels.start()
    third = tensor()
    levels.mark()
    levels.stop()
    assert [(s.level, s.peak) for s in levels.segments] == [(0, 2 * SIZE), (2 * SIZE, 2 * SIZE)]
    del first, second, third


def test_it_does_not_start_beside_another_profiler() -> None:
    levels = Levels(torch.device("cpu"))
    profiling.start_memory_events()
    try:
        assert not levels.start()
    finally:
        profiling.stop_memory_events()
    assert not levels.running


def test_a_recording_ends_when_backward_returns() -> None:
    weight = torch.ones(256, 256, requires_grad=True)
    levels = Levels(torch.device("cpu"))
    levels.start()
    levels.mark()
    result = (weight * weight).exp()

    def ended() -> None:
        levels.mark()
        autograd.when_backward_returns(levels.stop)

    def begins(gradients: object) -> None:
        levels.mark()
        autograd.at_end_of_backward(ended)

    assert result.grad_fn is not None
    autograd.before_backward(result.grad_fn, begins)
    result.backward(torch.ones(256, 256))
    assert not levels.running
    assert not profiling.is_profiling()
    assert weight.grad is not None
    forward, backward, after = levels.segments
    # At the end there are the result, the gradient that came in and the one that was made.
    assert (forward.level, backward.level, after.level) == (0, 2 * SIZE, 3 * SIZE)


@pytest.mark.cuda
def test_levels_on_cuda() -> None:
    levels = Levels(torch.device("cuda"))
    assert levels.start()
    levels.mark()
    held = torch.empty(256, 256, device="cuda")
    levels.mark()
    del held
    levels.stop()
    assert [(s.level, s.peak) for s in levels.segments] == [(0, SIZE), (SIZE, SIZE)]
