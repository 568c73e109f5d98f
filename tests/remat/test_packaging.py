"""The wheel holds every package once, whichever way it is built, and says how to enter."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LAYERS = ("remat", "passes", "solvers")
FILES = ("pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")
BUILD = """
import sys, setuptools.build_meta as backend
print(backend.{hook}(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone has, links included: building writes into its tree."""
    copy = tmp_path_factory.mktemp("clone")
    for name in LAYERS:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=ignore)
    for name in (
        "pyproject.toml",
        "setup.py",
        "MANIFEST.in",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
    ):
        shutil.copy(ROOT / name, copy)
    return copy


@pytest.fixture(scope="module")
def wheel(sources: Path, tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    return _build_wheel(sources, tmp_path_factory.mktemp("wheel"))


def _build(sources: Path, hook: str, into: Path) -> Path:
    command = [sys.executable, "-c", BUILD.format(hook=hook), str(into)]
    done = subprocess.run(command, cwd=sources, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return into / done.stdout.split()[-1]


def _build_wheel(sources: Path, into: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(_build(sources, "build_wheel", into))


def _modules_of_the_checkout() -> list[str]:
    found = []
    for layer in LAYERS:
        for path in (ROOT / layer).rglob("*.py"):
            inside = path.relative_to(ROOT)
            if layer == "remat" and inside.parts[1] in ("passes", "solvers"):
                continue
            found.append(inside.as_posix() if layer == "remat" else f"remat/{inside.as_posix()}")
    return sorted(found)


def _page_of(wheel: zipfile.ZipFile) -> list[str]:
    return sorted(name for name in wheel.namelist() if name.startswith("remat/report/page/"))


def _modules_of(wheel: zipfile.ZipFile) -> list[str]:
    return sorted(name for name in wheel.namelist() if name.endswith(".py"))


def test_every_folder_with_python_files_is_a_package() -> None:
    folders = {path.parent for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    assert [f for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_wheel_holds_every_module_once(wheel: zipfile.ZipFile) -> None:
    assert _modules_of(wheel) == _modules_of_the_checkout()
    assert "remat/py.typed" in wheel.namelist()


def test_wheel_holds_what_a_page_is_made_of(wheel: zipfile.ZipFile) -> None:
    parts = sorted(path.name for path in (ROOT / "remat" / "report" / "page").iterdir())
    assert _page_of(wheel) == [f"remat/report/page/{name}" for name in parts]
    assert "page.html" in parts


def test_wheel_declares_how_to_enter(wheel: zipfile.ZipFile) -> None:
    names = {name.rsplit("/", 1)[-1]: name for name in wheel.namelist() if ".dist-info/" in name}
    entries = wheel.read(names["entry_points.txt"]).decode()
    assert "[console_scripts]\nremat = remat.cli:main" in entries
    assert "[torch_dynamo_backends]\nremat = remat.backend:backend" in entries
    metadata = wheel.read(names["METADATA"]).decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Python: >=3.11" in metadata


def test_a_wheel_from_the_sdist_is_the_same(
    sources: Path, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    """An sdist holds no links, so this is also the build of a checkout that could not make them."""
    with tarfile.open(_build(sources, "build_sdist", tmp_path)) as archive:
        assert not any(member.issym() for member in archive.getmembers())
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = (path for path in tmp_path.iterdir() if path.is_dir())
    again = _build_wheel(unpacked, tmp_path)
    assert _modules_of(again) == _modules_of(wheel)
    assert _page_of(again) == _page_of(wheel)


def test_links_lead_to_the_layers() -> None:
    for name in ("passes", "solvers"):
        assert (ROOT / "remat" / name).resolve() == ROOT / name


def test_the_readme_and_the_ci_run_the_same_tests() -> None:
    """The README's second command ends in the command that .ci/run ends in."""
    readme = (ROOT / "README.md").read_text()
    command = next(line for line in readme.splitlines() if "'.[test]'" in line)
    assert command.split("&&")[-1].strip() == (ROOT / ".ci" / "run").read_text().splitlines()[-1]


def test_torch_range_admits_the_version_the_readme_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "torch>=2.11,<2.15" in project["dependencies"]
    assert "torch==2.13.0" in (ROOT / "README.md").read_text()
    assert "torch==2.13.0" in (ROOT / ".ci" / "run").read_text()
