"""What a whole step reads and leaves behind beside its tensors: keyed, or refused in words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.solvers.errors import CaptureError
from remat.step_names import Same, described

WEIGHT = torch.ones(2, requires_grad=True)
FACTOR = 1.0
STATE = torch.zeros(2)


def compiled(step: Callable[..., Any]) -> Any:
    return remat.compile_step(step, time_limit=0.2, cost="roofline")


def test_an_id_that_is_given_away_is_no_key() -> None:
    class Thing:
        pass

    thing = Thing()
    key = Same(thing)
    assert key == Same(thing)
    del thing
    assert key != key, "its object is gone: whoever has the id now is another"
    assert len({described(1), described(1.0), described(True), described("1")}) == 4
    assert described(float("nan")) == described(float("nan"))
    calls = nn.Linear(1, 1)
    assert described(calls.forward) == described(calls.forward)


def test_functions_made_anew_are_told_apart() -> None:
    """The second function may lie where the first one lay."""
    step = compiled(lambda f: torch.autograd.grad(f(WEIGHT).sum(), WEIGHT)[0])
    for factor in (2.0, 3.0, 4.0):
        assert step(lambda w, k=factor: w * k)[0] == factor


def test_numbers_of_other_types_are_told_apart() -> None:
    step = compiled(lambda k: torch.autograd.grad(WEIGHT.sum(), WEIGHT)[0].to(torch.int64) * k)
    found = [step(k).dtype for k in (1, 1.0, True)]
    assert found == [torch.int64, torch.float32, torch.int64]
    assert len(step.plans) == 3


def test_numbers_that_a_step_names_are_part_of_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    inside = 1.0

    class Trainer:
        def __init__(self) -> None:
            self.factor, self.calls = 1.0, 0
            self.scale = nn.Dropout(0.0)

        def loss(self) -> Tensor:
            return self.scale(WEIGHT).sum() * self.factor * FACTOR * inside

        def step(self) -> Tensor:
            return torch.autograd.grad(self.loss(), WEIGHT)[0]

    trainer = Trainer()
    step = compiled(trainer.step)
    assert step().tolist() == [1.0, 1.0]
    trainer.calls += 1  # the step does not read it
    step()
    assert len(step.plans) == 1
    trainer.factor = 2.0
    assert step().tolist() == [2.0, 2.0]
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert step().tolist() == [6.0, 6.0]
    inside = 2.0
    assert step().tolist() == [12.0, 12.0]
    trainer.scale.p = 1.0
    assert step().tolist() == [0.0, 0.0]


def test_the_dtype_of_autocast_is_part_of_the_key() -> None:
    layer, x = nn.Linear(2, 2), torch.ones(1, 2)

    run = compiled(lambda x: (torch.autograd.grad((y := layer(x)).sum(), layer.weight), y))
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            assert run(x)[1].dtype == dtype


def test_memory_that_comes_to_be_shared_is_seen() -> None:
    def step(x: Tensor, counts: Tensor) -> Tensor:
        counts.add_(1)
        return torch.autograd.grad((WEIGHT * x).sum(), WEIGHT)[0]

    run = compiled(step)
    assert run(torch.ones(2), torch.ones(2)).tolist() == [1.0, 1.0]
    base = torch.ones(4)
    with pytest.raises(CaptureError, match="another of its inputs shares"):
        run(base[:2], base.view(2, 2)[0])


def _loss_and_gradient(w: Tensor) -> tuple[Tensor, Tensor]:
    loss = (w * 2).sum()
    return loss, torch.autograd.grad(loss, w)[0]


def rebinds_global() -> Tensor:
    global STATE
    loss, gradient = _loss_and_gradient(WEIGHT)
    STATE = STATE + gradient
    return loss


def test_a_global_that_is_bound_anew_is_refused() -> None:
    before = STATE
    with pytest.raises(CaptureError, match="leaves another tensor in STATE"):
        compiled(rebinds_global)()
    assert STATE is before


def test_what_is_put_into_containers_or_given_other_memory_is_refused() -> None:
    w = torch.ones(2, requires_grad=True)
    seen: list[Tensor] = []
    means = {"loss": torch.zeros(())}

    def appends() -> Tensor:
        loss, gradient = _loss_and_gradient(w)
        seen.append(loss)
        return gradient

    def replaces() -> Tensor:
        means["loss"], gradient = _loss_and_gradient(w)
        return gradient

    def moves() -> Tensor:
        loss, gradient = _loss_and_gradient(w)
        w.data = w.data - gradient
        return loss

    for step, name in ((appends, "seen"), (replaces, "means"), (moves, "w")):
        with pytest.raises(CaptureError, match=f"leaves another tensor in {name} than was there"):
            compiled(step)()
    assert w.tolist() == [1.0, 1.0]
    assert means["loss"].item() == 0


class Remembers(nn.Module):
    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(2))
        self.last = None
        self.what = what

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        setattr(self, self.what, y.detach().mean(0))
        return y.sum()


@pytest.mark.parametrize("what", ["mean", "last", "fresh"])
def test_modules_that_bind_tensors_anew_are_refused(what: str) -> None:
    net = Remembers(what)
    mean = net.mean
    run = compiled(lambda x: torch.autograd.grad(net(x), net.linear.weight))
    with pytest.raises(CaptureError, match=rf"leaves another tensor in Remembers\.{what}"):
        run(torch.ones(1, 2))
    assert net.mean is mean
    assert net.last is None
    assert not hasattr(net, "fresh")


@pytest.mark.filterwarnings("ignore::UserWarning")  # of the flags below
def test_a_list_of_the_parameters_themselves_is_no_other_tensor() -> None:
    """Recurrent layers make such a list again when their parameters were swapped."""
    net, x = nn.LSTM(2, 2), torch.ones(3, 1, 2)
    weights = list(net._flat_weights)
    (wanted,) = torch.autograd.grad(net(x)[0].sum(), net.weight_hh_l0)
    run = compiled(lambda x: torch.autograd.grad(net(x)[0].sum(), net.weight_hh_l0))
    with pytest.raises(CaptureError, match="oneDNN's recurrent layers"):
        run(x)
    with torch.backends.mkldnn.flags(enabled=False):
        (found,) = run(x)
    assert torch.allclose(found, wanted)
    assert all(now is before for now, before in zip(net._flat_weights, weights, strict=True))


def test_a_plan_leaves_the_options_of_an_optimizer() -> None:
    class Counting(torch.optim.SGD):
        def step(self) -> None:
            self.param_groups[0]["count"] += 1
            super().step()

    w = nn.Parameter(torch.ones(2))
    optimizer = Counting([{"params": [w], "count": 0}], lr=0.5)

    def step() -> None:
        w.grad = None
        (w * 2).sum().backward()
        optimizer.step()

    run = compiled(step)
    run.plan()
    assert optimizer.param_groups[0]["count"] == 0
    run()
    assert optimizer.param_groups[0]["count"] == 1
    assert w.tolist() == [0.0, 0.0]


def test_hooks_and_histories_are_refused() -> None:
    outer, net, x = nn.Linear(2, 2), nn.Linear(2, 2), torch.ones(1, 2)

    def step(x: Tensor) -> Tensor:
        loss = net(x).sum()
        loss.backward()
        return loss

    run = compiled(step)
    with pytest.raises(CaptureError, match="its autograd history"):
        run(outer(x))
    run(x)
    for register in (net.weight.register_hook, net.bias.register_post_accumulate_grad_hook):
        handle = register(lambda given: None)
        with pytest.raises(CaptureError, match="has hooks"):
            run(x)
        handle.remove()
    net.zero_grad()
    run(x)
    assert net.weight.grad is not None
    assert outer.weight.grad is None


def test_modules_that_exchange_gradients_are_refused() -> None:
    class DistributedDataParallel(nn.Linear):
        pass

    net = DistributedDataParallel(2, 2)
    with pytest.raises(CaptureError, match="exchanges gradients in hooks"):
        compiled(lambda x: torch.autograd.grad(net(x).sum(), net.weight))(torch.ones(1, 2))
