"""``offload=`` from the option to the plan: refusals, the link, budgets, copies, processes."""

from __future__ import annotations

import copy
import dataclasses
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import remat
from remat import partitioner, sharing
from remat.cost import link as links
from remat.cost.device import find_device
from remat.cost.link import find_link
from remat.options import Options
from remat.partitioner import untouched
from remat.passes import transfers
from remat.solvers.errors import InvalidOption, RematError
from remat.solvers.keep import keep_everything
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Solution
from remat.solvers.simulate import simulate
from remat.step_json import step_plan_from_json, step_plan_to_json
from tests.passes.offloads import offload, offloadable
from tests.remat.broken import Broken, gradients

OPTIONS: dict[str, Any] = {"time_limit": 2.0, "cost": "roofline"}
FAST = Link(1e13, 1e13, 0.0)


class Net(nn.Module):
    """Activations dominate."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 48) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(links, "_time_disk", lambda directory: FAST)


def make() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(2048, 48)


def step_of(call: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    return lambda: call(x).backward()


def same(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def half(model: Net, x: Tensor) -> int:
    """A budget that is met by keeping half of what the baseline keeps."""
    plan = remat.plan(model, (x,), cost="roofline")
    return plan.problem.fixed_bytes + (plan.baseline_peak - plan.problem.fixed_bytes) // 2


def offloading(model: Net, x: Tensor, directory: Path) -> remat.Plan:
    """A stored plan that offloads all it can, made without a solver."""
    plan = remat.plan(model, (x,), cost="roofline")
    values = offloadable(plan.problem, plan.baseline)
    schedule = offload(plan.problem, plan.baseline, values)
    timeline = simulate(plan.problem, schedule, FAST)
    solution = dataclasses.replace(plan.solution, schedule=schedule, timeline=timeline)
    return dataclasses.replace(plan, solution=solution, link=FAST, offload=str(directory))


def offload_all(problem: Problem, **options: Any) -> Solution:
    """Stands for a solver, so that what is run does not depend on how busy the machine is."""
    kept, budget = keep_everything(problem), options.get("memory_budget")
    schedule = offload(problem, kept, offloadable(problem, kept))
    return untouched(problem, schedule, simulate(problem, schedule, options["link"]), budget)


def test_a_budget_is_kept_by_offloading(tmp_path: Path) -> None:
    model, x = make()
    wanted = gradients(model, step_of(model, x))
    budget = half(model, x)
    run = remat.compile(model, memory_budget=budget, offload=tmp_path, **OPTIONS)
    for _ in range(2):
        assert same(wanted, gradients(model, step_of(run, x)))
    (plan,) = run.plans
    assert isinstance(plan, remat.Plan)
    assert plan.offload == str(tmp_path)
    assert plan.link == FAST
    assert plan.offloaded_bytes > 0
    assert {row.action for row in plan.decisions.values()} >= {"keep", "offload"}

    def clean() -> None:
        run(x).backward()
        model.zero_grad()

    measured = remat.measure(clean, resident=(model, x))
    assert measured.peak <= budget
    assert measured.peak == plan.peak - plan.problem.fixed_bytes + measured.resident
    assert transfers.stored_count() == 0
    assert list(tmp_path.iterdir()) == []
    check_stored(plan, tmp_path)
    check_copies(run, x, wanted)


def check_stored(plan: remat.Plan, tmp_path: Path) -> None:
    """A stored plan brings its link and its place, unless another one is given."""
    again = remat.Plan.from_json(plan.to_json())
    assert again == plan
    other = tmp_path / "other"
    other.mkdir()
    torch._dynamo.reset()
    model, x = make()
    run = remat.compile(model, plan=again, offload=other)
    run(x).backward()
    (found,) = run.plans
    assert isinstance(found, remat.Plan)
    assert (found.offload, found.link) == (str(other), FAST)
    assert found.solution.schedule == plan.solution.schedule
    assert list(other.iterdir()) == []


def check_copies(run: Any, x: Tensor, wanted: list[Tensor]) -> None:
    """Neither a copy nor a pickle has anything of what is offloaded."""
    loss = run(x)
    for twin in (copy.deepcopy(run), pickle.loads(pickle.dumps(run))):
        torch._dynamo.reset()
        assert same(wanted, gradients(twin, step_of(twin, x)))
    run.zero_grad()
    loss.backward()
    assert same(wanted, [p.grad for p in run.parameters()])


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_several_graphs_share_a_budget_by_offloading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (partitioner, sharing):
        monkeypatch.setattr(module, "solve", offload_all)
        monkeypatch.setattr(module, "least_peak", offload_all)
    torch.manual_seed(0)
    model, x = Broken(), torch.randn(1024, 64)
    wanted = gradients(model, step_of(model, x))
    run = remat.compile(model, memory_budget=0.7, offload=tmp_path, **OPTIONS)
    for _ in range(3):
        assert same(wanted, gradients(model, step_of(run, x)))
    step_plan = run.step_plan
    assert step_plan is not None
    assert sum(plan.offloaded_bytes for plan in step_plan.plans) > 0
    assert step_plan.peak <= step_plan.memory_budget
    model.zero_grad()
    assert remat.measure(step_of(run, x), resident=(model, x)).peak <= step_plan.memory_budget
    assert step_plan_from_json(step_plan_to_json(step_plan)) == step_plan
    joined, schedule = step_plan.joined, step_plan.solution.schedule
    parts = joined.split(schedule)
    assert sum(s.kind == "offload" for part in parts for s in part.steps) == sum(
        s.kind == "offload" for s in schedule.steps
    )
    assert joined.split(joined.schedule(parts)) == parts


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_code_that_inductor_generates_offloads_as_planned(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = tmp_path_factory.getbasetemp() / "inductor"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(base))
    monkeypatch.setattr(partitioner, "solve", offload_all)
    monkeypatch.setattr(partitioner, "least_peak", offload_all)
    model, x = make()
    wanted = gradients(model, step_of(model, x))
    run = remat.compile(model, memory_budget=0.9, executor="inductor", offload=tmp_path, **OPTIONS)
    found = gradients(model, step_of(run, x))
    assert all(
        torch.allclose(a, b, rtol=1e-3, atol=1e-9) for a, b in zip(wanted, found, strict=True)
    )
    (plan,) = run.plans
    assert isinstance(plan, remat.Plan)
    assert plan.offloaded_bytes > 0
    assert plan.peak < plan.baseline_peak
    losses = [run(x)]
    for _ in range(2):
        assert same(found, gradients(model, lambda: losses[0].backward(retain_graph=True)))
    losses.clear()
    assert transfers.stored_count() == 0

    def clean() -> None:
        run(x).backward()
        model.zero_grad()

    measured = remat.measure(clean, resident=(model, x))
    assert measured.peak == plan.peak - plan.problem.fixed_bytes + measured.resident
    assert list(tmp_path.iterdir()) == []


def test_a_plan_with_offload_says_the_steps_of_each_copy(tmp_path: Path) -> None:
    model, x = make()
    plan = remat.plan(model, (x,), memory_budget=half(model, x), offload=tmp_path, **OPTIONS)
    names = [value.name for value in plan.problem.values]
    for row in plan.decisions.values():
        if row.action == "offload":
            kinds = [
                s.kind
                for s in plan.solution.schedule.steps
                if s.kind != "compute" and s.index == names.index(row.value)
            ]
            assert kinds[:3] == ["offload", "wait", "free"]
            assert kinds.count("reload") == kinds.count("wait") - 1 >= 1


def test_a_link_that_is_no_use_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "_time_disk", lambda directory: Link(1e3, 1e3, 1.0))
    model, x = make()
    budget = half(model, x)
    plan = remat.plan(model, (x,), memory_budget=budget, offload=tmp_path, **OPTIONS)
    assert plan.offloaded_bytes == 0


def test_host_memory_on_a_cpu_is_refused_before_the_first_step() -> None:
    model, x = make()
    run = remat.compile(model, memory_budget=0.5, offload=True)
    with pytest.raises(InvalidOption, match="its tensors are in host memory already"):
        run(x)


def test_a_device_that_is_not_here_has_the_link_of_its_generation() -> None:
    assert find_link("host", find_device("h100")).reload_bandwidth == 50e9
    assert find_link("host", find_device("a100")).reload_bandwidth == 25e9


def test_a_place_is_timed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[str] = []

    def time_disk(directory: str) -> Link:
        timed.append(directory)
        return FAST

    monkeypatch.setattr(links, "_time_disk", time_disk)
    here, there = tmp_path / "here", tmp_path / "there"
    for _ in range(2):
        for place in (here, there):
            assert find_link(str(place), find_device("cpu")) == FAST
    assert timed == [str(here), str(there)]


def test_a_disk_is_timed_through_a_file_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(links, "_COPIED_BYTES", 2**20)
    found = links._time_disk(str(tmp_path))
    assert found.offload_bandwidth > 1e5
    assert found.reload_bandwidth > 1e5
    assert 0 < found.latency < 10
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_in_memory_is_named_in_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, memory = tmp_path / "disk", tmp_path / "in memory"
    for place in (disk, memory, memory / "below"):
        place.mkdir()
    mounts = tmp_path / "mounts"
    escaped = str(memory).replace(" ", r"\040")
    mounts.write_text(f"root / ext4 rw 0 0\nnone {escaped} tmpfs rw,size=1g 0 0\n")
    assert links.file_system(str(disk), str(mounts)) == "ext4"
    assert links.file_system(str(memory / "below"), str(mounts)) == "tmpfs"
    assert links.file_system(str(disk), str(tmp_path / "nowhere")) is None
    monkeypatch.setattr(links, "file_system", lambda where: "tmpfs")
    model, x = make()
    plan = remat.plan(model, (x,), cost="roofline", offload=memory)
    assert any("still takes this machine's memory" in note for note in plan.notes)
    assert links.Offloading("host", FAST).notes == ()


def test_directories_are_checked_when_they_are_given(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for given, message in (
        (tmp_path / "nowhere", "is not there; give a directory that exists"),
        (file, "is no directory"),
        ("/proc", "no file can be written there"),
    ):
        with pytest.raises(InvalidOption, match=message):
            remat.compile(nn.Linear(2, 2), offload=given)
    assert Options.make(offload=tmp_path).offload == str(tmp_path)
    assert Options.make(offload=True).offload == "host"
    with pytest.raises(InvalidOption, match="a CUDA graph cannot write files"):
        Options.make(offload=tmp_path, executor="cudagraph")


def test_a_relative_directory_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "host").mkdir()
    assert Options.make(offload="./host").offload == str(tmp_path / "host")


def test_a_disk_without_room_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    model, x = make()
    run = remat.compile(model, plan=offloading(model, x, tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(RematError, match=r"setting .* aside failed: .*No space left"):
            run(x)
    assert all(p.grad is None for p in model.parameters())


KILLED = """
import os, signal, sys, torch
from remat.passes import offload
token = torch.ops.remat.offload(torch.randn(100_000), sys.argv[1], True)
back = torch.ops.remat.reload(token, [100_000], [1], torch.float32, torch.device("cpu"))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_cannot_read_what_its_parent_offloaded(tmp_path: Path) -> None:
    value = torch.randn(1000)
    token = torch.ops.remat.offload(value, str(tmp_path), True)
    torch.ops.remat.wait_offload(token, value)
    reading = token, [1000], [1], torch.float32, value.device
    child = os.fork()
    if child == 0:
        try:
            torch.ops.remat.reload(*reading)
        except RematError as error:
            os._exit(0 if "run both in one process" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    back = torch.ops.remat.reload(*reading)
    torch.ops.remat.wait_reload(token, back)
    assert torch.equal(back, value)
