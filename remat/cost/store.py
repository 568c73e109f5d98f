"""Measured figures on disk: one JSON file an environment, in the user's cache folder.

The folder is ``$REMAT_CACHE_DIR``, else ``$XDG_CACHE_HOME/remat``, else ``~/.cache/remat``.
Deleting it costs nothing but the time to measure again.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

FORMAT: Final = 3
"""Raise it when figures of an older version must not be read any more."""


def cache_folder() -> Path:
    """Where measured figures are kept; it need not exist."""
    if chosen := os.environ.get("REMAT_CACHE_DIR"):
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "remat"


def environment(device: torch.device) -> tuple[str, ...]:
    """All that a measured figure depends on, beside the op: device, torch, threads, switches."""
    common = (
        f"format {FORMAT}",
        f"torch {torch.__version__}",
        f"deterministic {torch.are_deterministic_algorithms_enabled()}",
    )
    if device.type == "cuda":
        return (
            *common,
            f"cuda {torch.version.cuda} hip {torch.version.hip}",
            torch.cuda.get_device_name(device),
            f"cudnn {torch.backends.cudnn.enabled} {torch.backends.cudnn.version()}",
            f"cudnn benchmark {torch.backends.cudnn.benchmark}",
            f"cudnn deterministic {torch.backends.cudnn.deterministic}",
            f"float32 products {torch.get_float32_matmul_precision()}",
        )
    return (
        *common,
        processor_name(),
        f"capability {torch.backends.cpu.get_cpu_capability()}",
        f"threads {torch.get_num_threads()}",
        f"mkldnn {torch.backends.mkldnn.enabled} mkl {torch.backends.mkl.is_available()}",
        f"float32 products {torch.get_float32_matmul_precision()}",
    )


def processor_name() -> str:
    """The processor's model, as far as the system tells."""
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:  # no Linux
        found = None
    return found.group(1).strip() if found else platform.processor() or platform.machine()


class Store:
    """A mapping from text to JSON values, read from a file when made, merged into it by ``save``.

    A file that cannot be read or written is warned of, and figures are then kept for this process
    only. Several processes may save at once: the file is replaced as a whole, and the worst that
    can happen is that one of them measures again what another had measured.
    """

    def __init__(self, kind: str, key: tuple[str, ...]) -> None:
        digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:16]
        self.path = cache_folder() / f"{kind}-{digest}.json"
        self.key = key
        self._values: dict[str, Any] = self._read()
        self._new: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values

    def put(self, name: str, value: Any) -> None:
        """Remember ``value``, a JSON value; on disk only after :meth:`save`."""
        self._values[name] = value
        self._new[name] = value

    def save(self) -> None:
        """Merge what is new into the file."""
        if not self._new:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, {"key": self.key, "values": self._read() | self._new})
        except OSError as error:
            warnings.warn(
                f"cannot write {self.path}: {error}; what was measured is lost when this process "
                "ends. Set REMAT_CACHE_DIR to a folder that can be written",
                stacklevel=2,
            )
        self._new.clear()

    def _read(self) -> dict[str, Any]:
        try:
            values = json.loads(self.path.read_text())["values"]
            if not isinstance(values, dict):
                raise ValueError("its values are no object")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, KeyError, TypeError) as error:
            warnings.warn(
                f"cannot read {self.path}: {error!r}; its figures are measured again", stacklevel=3
            )
            return {}
        return values


def replace_file(path: Path, content: Mapping[str, Any]) -> None:
    """Write a new file beside the old one and put it in its place, so that no reader sees half."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(content, file)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
