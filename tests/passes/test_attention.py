"""Attention is routed as torch's dispatcher on CUDA would, and saves what that kernel saves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import remat
from remat.cost.device import find_device
from remat.passes.attention import Attention, Capability, attend, choose_kernel, kernels_in
from remat.passes.torch_private import dynamo

AMPERE, ADA, VOLTA = Capability((8, 0)), Capability((8, 9)), Capability((7, 0))
HOPPER, OLD_HOPPER = Capability((9, 0), 91501), Capability((9, 0), 91002)


def call(
    dtype: torch.dtype = torch.bfloat16,
    width: int = 64,
    length: int = 128,
    keys: int | None = None,
    *,
    trains: bool = True,
    **options: Any,
) -> Attention:
    q = torch.empty(2, 4, length, width, dtype=dtype, requires_grad=trains)
    heads = 2 if options.get("grouped") else 4
    k, v = (torch.empty(2, heads, keys or length, width, dtype=dtype) for _ in range(2))
    return Attention(q, k, v, **options)


MASK = torch.zeros(128, 128, dtype=torch.bool)


@pytest.mark.parametrize(
    ("device", "given", "kernel"),
    [
        (AMPERE, call(), "flash"),
        (AMPERE, call(causal=True), "flash"),
        (AMPERE, call(width=60), "flash"),  # padded to 64
        (AMPERE, call(grouped=True), "flash"),
        (AMPERE, call(torch.float32), "efficient"),
        (AMPERE, call(torch.float32, grouped=True), "math"),
        (AMPERE, call(torch.float32, width=66), "math"),
        (AMPERE, call(torch.float64), "math"),
        (AMPERE, call(mask=MASK), "efficient"),
        (AMPERE, call(mask=MASK, width=60), "math"),
        (AMPERE, call(causal=True, keys=64), "efficient"),
        (AMPERE, call(width=256), "flash"),
        (AMPERE, call(width=264), "efficient"),
        (ADA, call(width=192), "flash"),
        (ADA, call(width=200), "efficient"),
        (ADA, call(width=200, trains=False), "flash"),
        (ADA, call(width=256), "flash"),
        (ADA, call(width=256, dropout=0.1), "efficient"),
        (VOLTA, call(torch.float16), "efficient"),
        (VOLTA, call(), "math"),
        (HOPPER, call(), "cudnn"),
        (HOPPER, call(mask=MASK), "cudnn"),
        (HOPPER, call(dropout=0.1), "flash"),
        (HOPPER, call(dropout=0.125), "cudnn"),
        (HOPPER, call(width=256), "flash"),
        (HOPPER, call(torch.float32), "efficient"),
        (OLD_HOPPER, call(), "flash"),
    ],
)
def test_the_kernel_of_a_call(device: Capability, given: Attention, kernel: str) -> None:
    assert choose_kernel(given, device) == kernel


def test_queries_that_are_no_batches_of_heads() -> None:
    q = torch.empty(4, 8, 16, dtype=torch.bfloat16)
    assert choose_kernel(Attention(q, q, q), AMPERE) == "math"


@pytest.mark.parametrize("device", [AMPERE, HOPPER, VOLTA], ids=["flash", "cudnn", "efficient"])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("grouped", [False, True])
def test_shapes_of_results_and_gradients(device: Capability, mask: bool, grouped: bool) -> None:
    """On fake tensors: the kernels themselves are CUDA's."""
    dtype = torch.float16
    with dynamo.fake_mode():
        q = torch.empty(2, 4, 40, 64, dtype=dtype, requires_grad=True)
        k, v = (
            torch.empty(2, 2 if grouped else 4, 40, 64, dtype=dtype, requires_grad=True)
            for _ in range(2)
        )
        given = torch.ones(40, 40, dtype=torch.bool) if mask else None
        out = attend(q, k, v, given, is_causal=not mask, enable_gqa=grouped, device=device)
        assert (out.shape, out.dtype) == (q.shape, dtype)
        gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert [g.shape for g in gradients] == [q.shape, k.shape, v.shape]


def test_the_math_path_gives_the_numbers_of_torch() -> None:
    q, k, v = (torch.randn(2, 4, 8, 16, dtype=torch.float64) for _ in range(3))
    found = attend(q, k, v, is_causal=True, device=AMPERE)
    assert torch.allclose(found, F.scaled_dot_product_attention(q, k, v, is_causal=True))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(64, 192), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h.transpose(1, 2).flatten(2))


@pytest.mark.parametrize(("name", "kernel"), [("a100", "flash"), ("h100", "cudnn")])
def test_a_plan_for_a_gpu_saves_what_its_kernel_saves(name: str, kernel: str) -> None:
    net, x = Net().bfloat16(), torch.randn(2, 128, 64, dtype=torch.bfloat16)
    plan = remat.plan(net, (x,), loss=lambda y: y.float().square().mean(), device=name)
    targets = [op.target for op in plan.problem.ops]
    assert kernels_in(targets) == {kernel: 1}
    assert any(f"attention runs as on {plan.device}: {kernel}" in note for note in plan.notes)
    # A logsumexp for every row of every head, and no probabilities.
    sizes = [value.bytes for value in plan.problem.values]
    assert 2 * 4 * 128 * 4 in sizes
    assert max(sizes) < 2 * 4 * 128 * 128 * 2

    def step(x: Tensor) -> Tensor:
        return torch.autograd.grad(net(x).float().square().mean(), net.out.weight)[0]

    whole = remat.compile_step(step, device=name).plan(x)
    assert kernels_in(op.target for op in whole.problem.ops) == {kernel: 1}
    assert any(f"as on {plan.device}: {kernel} (1)" in note for note in whole.notes)


def test_the_devices_that_are_described_know_their_capability() -> None:
    assert find_device("h100").capability == Capability((9, 0), 91501)
    assert find_device("4090").capability == Capability((8, 9), 91501)
    assert find_device("cpu").capability is None
    assert find_device("mi300x").capability is None
