"""What ``remat doctor`` looks at: each check is a function that answers with findings."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import pkgutil
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from remat import __version__
from remat.solvers.errors import RematError
from remat.solvers.units import format_bytes

State = Literal["ok", "note", "fails"]

PYTHON: Final = (3, 11)
TORCH: Final = ((2, 11), (2, 15))
"""The first version of torch that is supported, and the first that is not."""
TESTED: Final = "2.13"
_NEEDS_INDUCTOR: Final = ("inductor", "fusing", "lowerings")


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        state: ``ok``; ``note``, what works otherwise than it might; ``fails``, what does not work.
        name: what was looked at.
        text: what was found, and, unless it is ok, why it matters.
        remedy: what to do about it.
    """

    state: State
    name: str
    text: str
    remedy: str = ""


Check = Callable[[], Iterator[Finding]]


def python() -> Iterator[Finding]:
    """The interpreter, and where remat is."""
    version = platform.python_version()
    if sys.version_info < PYTHON:
        yield Finding("fails", "python", f"{version}; remat needs 3.11 or newer", "install it")
    else:
        yield Finding("ok", "python", f"{version}, {platform.system()} {platform.machine()}")
    import remat

    yield Finding("ok", "remat", f"{__version__} in {Path(remat.__file__).parent}")


def torch_version() -> Iterator[Finding]:
    """torch, and whether it is one remat is written for."""
    try:
        import torch
    except (ImportError, OSError) as error:  # OSError: one of its shared libraries
        yield Finding("fails", "torch", f"cannot be imported: {error}", "pip install torch==2.13.0")
        return
    found = torch.__version__
    parts = tuple(int(part) for part in found.split("+")[0].split(".")[:2])
    if not TORCH[0] <= parts < TORCH[1]:
        yield Finding(
            "fails", "torch", f"{found}; remat is written for 2.11 to 2.14",
            "pip install torch==2.13.0",
        )  # fmt: skip
    elif not found.startswith(TESTED):
        yield Finding("note", "torch", f"{found}; remat is written for it, and tested with 2.13")
    else:
        yield Finding("ok", "torch", found)


def private_torch() -> Iterator[Finding]:
    """Whether the parts of torch that have no promise are where they were."""
    from remat.options import default_executor
    from remat.passes import torch_private

    with_inductor = default_executor() == "inductor"
    names = [module.name for module in pkgutil.iter_modules(torch_private.__path__)]
    broken = []
    for name in names:
        if name in _NEEDS_INDUCTOR and not with_inductor:
            continue
        try:
            importlib.import_module(f"{torch_private.__name__}.{name}")
        except (ImportError, AttributeError) as error:
            broken.append(f"{name}: {error}")
    if broken:
        yield Finding(
            "fails", "internals", f"this torch has no longer what remat uses ({'; '.join(broken)})",
            "pip install torch==2.13.0, or report it with this line",
        )  # fmt: skip
    else:
        yield Finding("ok", "internals", "all parts of torch that remat uses are there")


def backend() -> Iterator[Finding]:
    """Whether ``torch.compile(backend="remat")`` finds remat, and compiles at all."""
    import torch._dynamo

    entries = importlib.metadata.entry_points(group="torch_dynamo_backends")
    if "remat" in entries.names:
        yield Finding("ok", "backend", 'torch.compile(backend="remat") finds it')
    else:
        yield Finding(
            "note", "backend", 'torch.compile(backend="remat") does not know it: remat is not '
            "installed, only there; remat.compile works", "pip install -e . in its folder",
        )  # fmt: skip
    if torch._dynamo.config.disable or os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        yield Finding(
            "fails", "compiling", "is turned off, so no step would be planned",
            "unset TORCH_COMPILE_DISABLE and TORCHDYNAMO_DISABLE",
        )  # fmt: skip


def device() -> Iterator[Finding]:
    """What steps would run on."""
    import torch

    from remat.budget import machine_memory
    from remat.cost.store import processor_name

    try:
        total, free = machine_memory()
        memory = f"{format_bytes(total)}, {format_bytes(free)} free"
    except RematError as error:
        memory = str(error)
    yield Finding("ok", "cpu", f"{processor_name()}, {torch.get_num_threads()} threads, {memory}")
    if not torch.cuda.is_available():
        why = "torch was built without CUDA" if torch.version.cuda is None else "no device answers"
        yield Finding(
            "note", "gpu", f"none ({why}); plans for one can be made: device=\"h100\"",
        )  # fmt: skip
        return
    for index in range(torch.cuda.device_count()):
        total, free = machine_memory(f"cuda:{index}")
        name = torch.cuda.get_device_name(index)
        yield Finding("ok", "gpu", f"{name}, {format_bytes(total)}, {format_bytes(free)} free")


def compiler() -> Iterator[Finding]:
    """What ``executor="inductor"`` needs, by trying it on ten lines."""
    from remat.options import default_executor

    chosen = default_executor()
    asked = " (REMAT_EXECUTOR)" if os.environ.get("REMAT_EXECUTOR") else ""
    found = next(filter(None, map(shutil.which, _compilers())), None)
    eager = 'executor="eager" needs none'
    if found is None:
        state: State = "fails" if chosen == "inductor" else "note"
        yield Finding("ok", "executor", f"{chosen}{asked}")
        yield Finding(
            state, "compiler", f"no C++ compiler, so inductor cannot compile for the CPU; {eager}",
            "install g++ or clang++, or set CXX",
        )  # fmt: skip
        return
    complaint = _try_compiler(found)
    yield Finding("ok", "executor", f"{chosen}{asked}")
    if complaint:
        state = "fails" if chosen == "inductor" else "note"
        yield Finding(
            state, "compiler", f"{found} does not compile with OpenMP ({complaint}); {eager}",
            "install its OpenMP library, or set REMAT_EXECUTOR=eager",
        )  # fmt: skip
    else:
        yield Finding("ok", "compiler", f"{found}, with OpenMP")


def _compilers() -> list[str]:
    return list(filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++", "cl")))


def _try_compiler(path: str) -> str:
    """Why it does not compile what inductor generates; empty if it does."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "try.cpp"
        source.write_text(
            "#include <omp.h>\n#include <cmath>\nint f() { return omp_get_max_threads(); }\n"
        )
        command = [path, "-fopenmp", "-shared", "-fPIC", str(source), "-o", str(source) + ".so"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[0] if lines else f"exit code {done.returncode}")


def caches() -> Iterator[Finding]:
    """Where measured costs, plans and compiled code are kept."""
    from remat.cost.store import cache_folder

    folder = cache_folder()
    chosen = " (REMAT_CACHE_DIR)" if os.environ.get("REMAT_CACHE_DIR") else ""
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not os.access(existing, os.W_OK):
        yield Finding(
            "note", "cache", f"{folder}{chosen} cannot be written: every process measures and "
            "plans again", "set REMAT_CACHE_DIR to a folder of yours",
        )  # fmt: skip
    else:
        yield Finding("ok", "cache", f"{folder}{chosen}, {_size(folder)}")
    code = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if code:
        yield Finding("ok", "code", f"inductor's cache is {code}, {_size(Path(code))}")


def _size(folder: Path) -> str:
    files = [path for path in folder.rglob("*") if path.is_file()] if folder.is_dir() else []
    if not files:
        return "empty"
    return f"{len(files)} files of {format_bytes(sum(path.stat().st_size for path in files))}"


def solver() -> Iterator[Finding]:
    """The linear solver, and the compiled search."""
    versions = []
    for package in ("pulp", "highspy", "numba", "networkx", "numpy"):
        try:
            importlib.import_module(package)
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except ImportError as error:
            yield Finding(
                "fails", "solver", f"{package} cannot be imported: {error}",
                f"pip install {package}",
            )  # fmt: skip
            return
    from remat.solvers.cold import KERNELS
    from remat.solvers.compiled import UNCACHED

    if not KERNELS.wait(None):
        yield Finding("note", "search", f"{KERNELS.complaints[0]}; plans are found without it")
    elif UNCACHED:
        yield Finding("note", "search", f"{UNCACHED[0]}: every process compiles it, half a minute")
    yield Finding("ok", "solver", ", ".join(versions))


def extras() -> Iterator[Finding]:
    """What only the demo and the examples need."""
    missing = [name for name in ("transformers", "accelerate") if not _is_installed(name)]
    if missing:
        needs = "remat demo and the Trainer example" if "transformers" in missing else (
            "the Trainer example"
        )  # fmt: skip
        listed = " and ".join(missing)
        yield Finding(
            "note", "extras", f"{listed} not installed: {needs} would not run",
            f"pip install {' '.join(missing)}",
        )  # fmt: skip


def _is_installed(package: str) -> bool:
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def trial() -> Iterator[Finding]:
    """A small step, planned, run, and measured."""
    import torch

    import remat

    model, batch = _small_model(), torch.randn(256, 64)
    try:
        step = remat.compile(model, memory_budget=0.0, executor="eager", time_limit=0.2)
        measured = remat.measure(lambda: step(batch).backward(), resident=(model, batch), warmup=2)
    except RematError as error:
        yield Finding("fails", "trial", f"a small step cannot be run: {error}", "report it")
        return
    (plan,) = step.plans
    if not isinstance(plan, remat.Plan):
        yield Finding("fails", "trial", f"a small step got no plan: {plan}", "report it")
        return
    figures = (
        f"{format_bytes(plan.peak)} planned, {format_bytes(measured.peak)} measured, "
        f"{format_bytes(plan.baseline_peak)} without remat"
    )
    if measured.peak > plan.peak:
        yield Finding("note", "trial", f"a small step took more than planned: {figures}")
    else:
        yield Finding("ok", "trial", f"a small step kept its plan: {figures}")


def _small_model() -> Any:
    import torch
    from torch import nn

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = torch.nn.functional.gelu(layer(x))
            return x.square().mean()

    return Small()


CHECKS: Final[tuple[Check, ...]] = (
    python, torch_version, private_torch, backend, device, compiler, caches, solver, extras, trial,
)  # fmt: skip
