"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path


def write_whole(path: str | Path, content: str | bytes) -> None:
    """Write a new file beside ``path`` and put it in its place: what was there stays until then.

    A disk that is full, or an end in the middle, leaves no half of a plan. Links are followed, the
    rights of a file that was there are kept; what is no file (a pipe, a device) is written to.

    Raises:
        OSError: it cannot be written; what was there is still there.
    """
    data = content.encode() if isinstance(content, str) else content
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    beside = target.with_name(f".remat-{secrets.token_hex(8)}.tmp")
    try:
        with beside.open("xb") as file:
            file.write(data)
        if target.exists():
            shutil.copymode(target, beside)
        beside.replace(target)
    finally:
        beside.unlink(missing_ok=True)
