"""Every example runs, with sizes that take seconds."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"
QUICK = ["--executor", "eager", "--time-limit", "0.3"]
Captured = pytest.CaptureFixture[str]
Run = Callable[[str, str], Any]

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs an example's ``main`` with a line of arguments."""

    def run(name: str, sizes: str) -> Any:
        spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)  # dataclasses and dynamo look there
        spec.loader.exec_module(module)
        torch._dynamo.reset()
        return module.main([*sizes.split(), *QUICK])

    return run


def test_each_example_has_a_test() -> None:
    names = {path.stem for path in EXAMPLES.glob("*.py")}
    assert names == {"plain_loop", "gradient_accumulation", "huggingface_trainer"}


def test_plain_loop(run: Run, capsys: Captured) -> None:
    run("plain_loop", "--steps 2 --layers 1 --hidden 32 --batch 4 --sequence 16 --vocabulary 64")
    printed = capsys.readouterr().out
    assert printed.count("loss ") == 2
    assert "budget " in printed
    assert "measured: peak " in printed
    assert "without remat it would have been" in printed


def test_gradient_accumulation(run: Run, capsys: Captured) -> None:
    run("gradient_accumulation", "--steps 2 --accumulate 2 --blocks 2 --hidden 32 --batch 64")
    printed = capsys.readouterr().out
    losses = [float(line.split()[1]) for line in printed.splitlines() if line.startswith("loss")]
    assert len(losses) == 2
    assert losses[1] < losses[0]
    assert "planned   " in printed


@pytest.mark.slow
def test_huggingface_trainer(run: Run, capsys: Captured) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    sizes = "--steps 4 --layers 2 --hidden 64 --batch 2 --sequence 32 --every-n-layers 0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # those of transformers, accelerate and the data loader
        rows = run("huggingface_trainer", sizes)
    plain, checkpointed, frugal = rows
    assert frugal.losses == plain.losses == checkpointed.losses
    assert frugal.peak <= checkpointed.peak < plain.peak
    printed = capsys.readouterr().out
    assert printed.count("\nbudget ") == 1  # one graph, one plan
    assert printed.splitlines()[-1].startswith("remat, memory_budget = that peak")
