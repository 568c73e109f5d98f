"""``remat doctor``: what works, what would not, and the exit code that says so."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from remat.cli import DONE, FAILED, _checks, main
from remat.cli._checks import CHECKS, Finding
from remat.plans import Plan

Captured = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def found(check: Callable[[], Iterator[Finding]], name: str) -> Finding:
    (finding,) = [finding for finding in check() if finding.name == name]
    return finding


def test_here_everything_works(capsys: Captured, monkeypatch: Patch) -> None:
    def checked_elsewhere() -> Iterator[Finding]:
        yield Finding("ok", "internals", "there")

    quick = [check if check is not _checks.private_torch else checked_elsewhere for check in CHECKS]
    monkeypatch.setattr(_checks, "CHECKS", tuple(quick))  # inductor's import takes eight seconds
    assert main(["doctor"]) == DONE
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "remat would work here"
    assert all(len(line) <= 80 for line in lines)
    for name in ("python", "torch", "internals", "cpu", "executor", "cache", "solver"):
        assert any(line.startswith("ok") and f" {name} " in line for line in lines), name
    assert any("a small step kept its plan" in line for line in lines)


def test_what_fails_is_the_exit_code(capsys: Captured, monkeypatch: Patch) -> None:
    def broken() -> Iterator[Finding]:
        yield Finding("note", "extras", "not there", "pip install them")
        yield Finding("fails", "compiler", "does not compile", "install one")

    monkeypatch.setattr(_checks, "CHECKS", (broken,))
    assert main(["doctor"]) == FAILED
    assert capsys.readouterr().out.splitlines() == [
        "note   extras      not there. pip install them",
        "FAILS  compiler    does not compile. install one",
        "",
        "would not work: compiler",
    ]


def test_a_check_that_breaks_is_a_finding(capsys: Captured, monkeypatch: Patch) -> None:
    def broken() -> Iterator[Finding]:
        yield Finding("ok", "cpu", "there")
        raise RuntimeError("no device answers")

    def sound() -> Iterator[Finding]:
        yield Finding("ok", "solver", "there")

    monkeypatch.setattr(_checks, "CHECKS", (broken, sound))
    assert main(["doctor"]) == FAILED
    printed = capsys.readouterr().out
    assert "FAILS  broken      could not be looked at: RuntimeError: no device answers" in printed
    assert "solver      there" in printed
    assert printed.endswith("would not work: broken\n")


def test_without_torch_nothing_else_is_tried(capsys: Captured, monkeypatch: Patch) -> None:
    def no_torch() -> Iterator[Finding]:
        yield Finding("fails", "torch", "cannot be imported")

    def never() -> Iterator[Finding]:
        raise AssertionError("tried")

    monkeypatch.setattr(_checks, "CHECKS", (no_torch, never))
    assert main(["doctor"]) == FAILED


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ("2.10.1", "fails"), ("2.15.0+cu130", "fails"), ("2.14.0", "note"), ("2.11.0", "note"),
        ("2.13.1+cpu", "ok"),
    ],
)  # fmt: skip
def test_versions_of_torch(monkeypatch: Patch, version: str, state: str) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", version)
    finding = found(_checks.torch_version, "torch")
    assert (finding.state, version in finding.text) == (state, True)


def test_a_torch_that_cannot_be_imported(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    finding = found(_checks.torch_version, "torch")
    assert finding.state == "fails"
    assert "pip install torch" in finding.remedy


def test_private_parts_of_torch(monkeypatch: Patch) -> None:
    monkeypatch.setenv("REMAT_EXECUTOR", "eager")
    assert found(_checks.private_torch, "internals").state == "ok"
    monkeypatch.setitem(sys.modules, "remat.passes.torch_private.dynamo", None)
    finding = found(_checks.private_torch, "internals")
    assert finding.state == "fails"
    assert "dynamo" in finding.text


def test_compiling_turned_off() -> None:
    import torch._dynamo

    with torch._dynamo.config.patch(disable=True):
        finding = found(_checks.backend, "compiling")
    assert finding.state == "fails"
    assert "TORCH_COMPILE_DISABLE" in finding.remedy


def test_remat_that_is_not_installed(monkeypatch: Patch) -> None:
    class Entries:
        names = frozenset({"inductor"})

    monkeypatch.setattr(_checks.importlib.metadata, "entry_points", lambda group: Entries())
    assert found(_checks.backend, "backend").state == "note"


@pytest.mark.parametrize(("executor", "state"), [("inductor", "fails"), ("eager", "note")])
def test_no_compiler(monkeypatch: Patch, executor: str, state: str) -> None:
    monkeypatch.setenv("REMAT_EXECUTOR", executor)
    monkeypatch.setattr(_checks.shutil, "which", lambda name: None)
    finding = found(_checks.compiler, "compiler")
    assert finding.state == state
    assert "no C++ compiler" in finding.text


def test_a_compiler_that_does_not_compile(monkeypatch: Patch) -> None:
    monkeypatch.setenv("REMAT_EXECUTOR", "inductor")
    monkeypatch.setattr(_checks.shutil, "which", lambda name: "/no/such/compiler")
    finding = found(_checks.compiler, "compiler")
    assert finding.state == "fails"
    assert "No such file" in finding.text


def test_caches(monkeypatch: Patch, tmp_path: Path) -> None:
    monkeypatch.setenv("REMAT_CACHE_DIR", str(tmp_path))
    (tmp_path / "costs.json").write_bytes(b"x" * 2048)
    assert "1 files of 2.00 KiB" in found(_checks.caches, "cache").text
    monkeypatch.setattr(_checks.os, "access", lambda path, mode: False)
    finding = found(_checks.caches, "cache")
    assert (finding.state, "REMAT_CACHE_DIR" in finding.remedy) == ("note", True)


def test_a_package_that_is_missing(monkeypatch: Patch) -> None:
    monkeypatch.setitem(sys.modules, "highspy", None)
    assert found(_checks.solver, "solver").state == "fails"


def test_kernels_that_cannot_be_cached(monkeypatch: Patch) -> None:
    from remat.solvers import compiled

    monkeypatch.setattr(compiled, "UNCACHED", ["machine code is not cached: read-only"])
    assert found(_checks.solver, "search").text.startswith("machine code is not cached")


def test_extras(monkeypatch: Patch) -> None:
    installed: set[str] = set()
    monkeypatch.setattr(_checks, "_is_installed", lambda name: name in installed)
    assert found(_checks.extras, "extras").remedy == "pip install transformers accelerate"
    installed |= {"transformers"}
    assert "the Trainer example would not run" in found(_checks.extras, "extras").text
    installed |= {"accelerate"}
    assert list(_checks.extras()) == []


def test_a_trial_that_takes_more_than_planned(monkeypatch: Patch, plan: Plan) -> None:
    import remat
    import remat.measurement

    class Step:
        plans: tuple[object, ...] = (plan,)

    measured = remat.measurement.Measurement(2**30, 0, 2**30, None, 1.0)
    monkeypatch.setattr(remat, "compile", lambda *_, **__: Step())
    monkeypatch.setattr(remat, "measure", lambda *_, **__: measured)
    finding = found(_checks.trial, "trial")
    assert finding.state == "note"
    assert "1.00 GiB measured" in finding.text
    Step.plans = ("not planned: nothing trains",)
    assert found(_checks.trial, "trial").state == "fails"


def test_a_trial_that_cannot_be_planned(monkeypatch: Patch) -> None:
    import remat
    from remat.solvers.errors import CaptureError

    def refuse(*_: object, **__: object) -> None:
        raise CaptureError("nothing can be captured")

    monkeypatch.setattr(remat, "compile", refuse)
    assert "nothing can be captured" in found(_checks.trial, "trial").text
