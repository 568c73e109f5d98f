"""What ``remat.compile`` returns as an object: a module like the model, copied, stored, dropped."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import threading
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat.plans import Plan
from remat.solvers.errors import InvalidOption, RematError

OPTIONS: dict[str, Any] = {"memory_budget": 0.5, "time_limit": 0.3}


class Net(nn.Module):
    """With a buffer, an attribute, a method, and ways of its own to train and to be iterated."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.register_buffer("scale", torch.ones(()))
        self.plan_of_the_day = "none"
        self.trained: list[bool] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x)) * self.scale
        return x.square().mean()

    def train(self, mode: bool = True) -> Net:
        self.trained.append(mode)
        return super().train(mode)

    def width(self) -> int:
        return int(self.layers[0].in_features)

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Any:
        return iter(self.layers)


@pytest.fixture(autouse=True)
def _fresh() -> None:
    torch._dynamo.reset()


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def x() -> Tensor:
    return torch.randn(64, 32)


def gradients(model: nn.Module, run: Any, x: Tensor) -> list[Tensor]:
    model.zero_grad()
    run(x).backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def same(ours: list[Tensor], plain: list[Tensor]) -> bool:
    pairs = zip(ours, plain, strict=True)
    return len(ours) > 0 and all(torch.equal(a, b) for a, b in pairs)


def test_it_is_a_module_of_the_same_parameters_under_the_same_names(net: Net) -> None:
    step = remat.compile(net, **OPTIONS)
    assert isinstance(step, nn.Module)
    assert list(step.state_dict()) == list(net.state_dict())
    for ours, plain in zip(step.named_parameters(), net.named_parameters(), strict=True):
        assert ours[0] == plain[0]
        assert ours[1] is plain[1]
    assert [name for name, _ in step.named_buffers()] == ["scale"]
    assert [name for name, _ in step.named_modules()] == [name for name, _ in net.named_modules()]
    assert next(step.modules()) is step
    assert list(step.children()) == list(net.children())
    assert step.get_parameter("layers.0.weight") is net.layers[0].weight
    assert step.get_submodule("layers.1") is net.layers[1]
    assert step._orig_mod is net


def test_it_may_be_a_part_of_another_module(net: Net, x: Tensor) -> None:
    whole = nn.Sequential(OrderedDict(body=remat.compile(net, **OPTIONS)))
    plain = nn.Sequential(OrderedDict(body=Net()))
    assert list(whole.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(whole.state_dict())
    assert same(gradients(whole, whole, x), gradients(plain, plain, x))
    whole.load_state_dict({name: value * 0 for name, value in plain.state_dict().items()})
    assert all(not p.any() for p in net.parameters())
    whole.double().eval()
    assert net.layers[0].weight.dtype == torch.float64
    assert not net.training
    assert len(list(whole.parameters())) == len(list(net.parameters()))


def test_attributes_are_the_models(net: Net) -> None:
    step = remat.compile(net, **OPTIONS)
    step.foo = 1
    assert net.foo == step.foo == 1
    step.head = nn.Linear(2, 2)
    assert "head.weight" in net.state_dict()
    del step.head, step.foo
    assert not hasattr(net, "foo")
    assert not hasattr(step, "head")
    assert step.width() == 32
    assert len(step) == 3
    assert list(step) == list(net.layers)
    assert step.plan_of_the_day == "none"
    assert "plan_of_the_day" in dir(step)
    with pytest.raises(AttributeError, match="remat's and cannot be set"):
        step.plans = ()
    bare = remat.compile(nn.Linear(2, 2))
    with pytest.raises(TypeError, match="has no len"):
        len(bare)
    assert bare


def test_a_model_with_attributes_of_our_names_still_runs(x: Tensor) -> None:
    class Clash(Net):
        def __init__(self) -> None:
            super().__init__()
            self.plans, self.step_plan, self._session, self._run = 2.0, 1, 2, 3

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.plans

    net = Clash()
    step = remat.compile(net, **OPTIONS)
    assert same(gradients(net, step, x), gradients(net, net, x))
    assert isinstance(step.plans[0], Plan)
    assert net.plans == 2.0
    assert step._session == 2


def test_modes_and_moves_go_through_the_models_own_methods(net: Net, x: Tensor) -> None:
    step = remat.compile(net, **OPTIONS)
    assert step.eval() is step
    assert net.trained == [False]
    assert step.training is net.training is False
    net.train()
    assert step.training
    step.training = False
    assert not net.training
    assert step.to(torch.float64) is step
    assert net.layers[0].weight.dtype == torch.float64
    assert same(gradients(net, step, x.double()), gradients(net, net, x.double()))
    step.requires_grad_(False)
    assert not any(p.requires_grad for p in net.parameters())
    step.layers[0].requires_grad_(True)
    step(x.double()).backward()
    step.zero_grad()
    assert net.layers[0].weight.grad is None


def test_its_forward_is_compiled_too_and_has_the_models_signature(net: Net, x: Tensor) -> None:
    step = remat.compile(net, **OPTIONS)
    step.forward(x).backward()
    assert isinstance(step.plans[0], Plan)
    assert list(inspect.signature(step.forward).parameters) == ["x"]


def test_hooks_of_the_whole_fire_once(net: Net, x: Tensor) -> None:
    step, seen = remat.compile(net, **OPTIONS), []
    step.register_forward_pre_hook(lambda *_: seen.append("before"))
    handle = net.register_forward_hook(lambda *_: seen.append("after"))
    step(x).backward()
    assert seen == ["before", "after"]
    handle.remove()
    with pytest.raises(RematError, match="register it before, or on the model itself"):
        step.register_forward_hook(lambda *_: seen.append("late"))
    net.register_forward_hook(lambda *_: seen.append("late"))
    torch._dynamo.reset()
    step(x).backward()
    assert seen[2:] == ["before", "late"]


def test_states_are_saved_and_loaded(net: Net, x: Tensor, tmp_path: Path) -> None:
    step = remat.compile(net, **OPTIONS)
    before = gradients(net, step, x)
    torch.save(step.state_dict(), tmp_path / "state.pt")
    other = remat.compile(Net(), **OPTIONS)
    other.load_state_dict(torch.load(tmp_path / "state.pt"))
    assert same(gradients(other, other, x), before)
    Net().load_state_dict(torch.load(tmp_path / "state.pt"))


@pytest.mark.parametrize("called", [False, True])
@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_copies_are_compiled_anew(net: Net, x: Tensor, way: str, called: bool) -> None:
    step = remat.compile(net, **OPTIONS)
    plain = gradients(net, net, x)
    if called:
        step(x).backward()
        net.zero_grad()
    if way == "deepcopy":
        twin = copy.deepcopy(step)
    elif way == "pickle":
        twin = pickle.loads(pickle.dumps(step))
    else:
        file = io.BytesIO()
        torch.save(step, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert type(twin) is type(step)
    assert twin.plans == ()
    assert same(gradients(twin, twin, x), plain)
    assert twin.plans[0].memory_budget is not None
    assert twin._orig_mod is not net
    assert copy.deepcopy(twin.plans[0]) == twin.plans[0]


def test_an_average_of_it_follows_the_model(net: Net, x: Tensor) -> None:
    step = remat.compile(net, **OPTIONS)
    average = torch.optim.swa_utils.AveragedModel(step)
    average.update_parameters(step)
    assert torch.equal(average.module.layers[0].weight, net.layers[0].weight)
    optimizer = torch.optim.SGD(step.parameters(), lr=0.1)
    step(x).backward()
    optimizer.step()
    average.update_parameters(step)
    assert not torch.equal(average.module.layers[0].weight, net.layers[0].weight)
    assert [n.removeprefix("module.") for n in average.state_dict() if n != "n_averaged"] == list(
        net.state_dict()
    )


def test_a_model_compiled_in_place_trains_and_is_saved(net: Net, x: Tensor) -> None:
    plain = gradients(net, net, x)
    keys = list(net.state_dict())
    net.compile(backend="remat", options=dict(OPTIONS), dynamic=False)
    assert same(gradients(net, net, x), plain)
    assert list(net.state_dict()) == keys
    twin = pickle.loads(pickle.dumps(net))
    assert same(gradients(twin, twin, x), plain)


def test_what_is_compiled_is_not_compiled_again(net: Net) -> None:
    step = remat.compile(net, **OPTIONS)
    with pytest.raises(InvalidOption, match=r"given what remat\.compile returned"):
        remat.compile(step)
    with pytest.raises(InvalidOption, match="one model is compiled once"):
        remat.compile(torch.compile(net, backend="eager"))
    with pytest.raises(RematError, match=r"compiled by remat\.compile already"):
        step.compile()
    net.compile(backend="eager")
    with pytest.raises(InvalidOption, match="one model is compiled once"):
        remat.compile(net)


# What Dynamo itself does when it resumes with an input that is not a leaf.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_under_torch_compile_it_runs_as_it_is(net: Net, x: Tensor) -> None:
    step = remat.compile(net, **OPTIONS)
    plain = gradients(net, net, x)
    outer = torch.compile(step, backend="eager")
    assert same(gradients(net, outer, x), plain)
    outer = torch.compile(lambda x: step(x) * 1, backend="eager")
    assert same(gradients(net, outer, x), plain)
    assert len(step.plans) == 1
    assert isinstance(step.plans[0], Plan)


def test_a_reset_of_the_compiler_between_steps(net: Net, x: Tensor) -> None:
    step = remat.compile(net, **OPTIONS)
    plain = gradients(net, net, x)
    for _ in range(2):
        assert same(gradients(net, step, x), plain)
        torch._dynamo.reset()


def test_two_models_with_two_budgets_take_turns(net: Net, x: Tensor) -> None:
    other = Net()
    first = remat.compile(net, memory_budget=0.0, time_limit=0.3)
    second = remat.compile(other, memory_budget=1.0, time_limit=0.3)
    expected = gradients(net, net, x), gradients(other, other, x)
    for _ in range(3):
        assert same(gradients(net, first, x), expected[0])
        assert same(gradients(other, second, x), expected[1])
    assert first.plans[0].peak < second.plans[0].peak


def test_threads_take_turns(net: Net, x: Tensor) -> None:
    step = remat.compile(net, on_unplanned="ignore", **OPTIONS)
    losses: list[Tensor] = []

    def work() -> None:
        for _ in range(5):
            losses.append(step(x))
        torch.autograd.grad(losses[0], list(net.parameters()), retain_graph=True)

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(losses) == 10
    plain = gradients(net, net, x)
    for loss in losses:
        ours = torch.autograd.grad(loss, list(net.parameters()), retain_graph=True)
        assert same(list(ours), plain)


def test_what_was_compiled_in_one_thread_runs_in_another(net: Net, x: Tensor) -> None:
    step = remat.compile(net, **OPTIONS)
    plain = gradients(net, net, x)
    assert same(gradients(net, step, x), plain)
    found: list[list[Tensor]] = []
    thread = threading.Thread(target=lambda: found.append(gradients(net, step, x)))
    thread.start()
    thread.join()
    assert same(found[0], plain)
    assert same(gradients(net, step, x), plain)


def test_copies_for_data_parallel_are_refused(net: Net) -> None:
    step = remat.compile(net, **OPTIONS)
    with pytest.raises(RematError, match="DataParallel copies a module at every call"):
        step._replicate_for_data_parallel()


def test_functions_and_methods_are_compiled(net: Net, x: Tensor) -> None:
    plain = gradients(net, net, x)
    for function in (lambda x: net(x) * 1, net.forward):
        step = remat.compile(function, **OPTIONS)
        assert not isinstance(step, nn.Module)
        assert same(gradients(net, step, x), plain)


def test_nothing_is_left_of_a_model_that_is_dropped(x: Tensor) -> None:
    net = Net()
    step = remat.compile(net, **OPTIONS)
    for _ in range(3):
        step(x).backward()
    watched = weakref.ref(net.layers[0].weight)
    del net, step
    gc.collect()
    assert watched() is None


def test_workers_of_a_loader_do_not_mind(net: Net, x: Tensor) -> None:
    step = remat.compile(net, **OPTIONS)
    loader = torch.utils.data.DataLoader(list(x), batch_size=32, num_workers=1)
    losses = [step(batch) for batch in loader]
    assert len(losses) == 2
    sum(losses).backward()
