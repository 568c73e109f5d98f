"""Files that are there as a whole or not at all."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from remat.files import write_whole


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_whole(tmp_path / "text", "größer → €")
    assert (tmp_path / "text").read_text(encoding="utf-8") == "größer → €"
    write_whole(tmp_path / "text", b"\x00\xff")
    assert (tmp_path / "text").read_bytes() == b"\x00\xff"


def test_what_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "plan.json"
    path.write_text("old")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_keeps_its_rights_and_a_link_its_target(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "file").chmod(0o640)
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    write_whole(pipe, b"plan")
    reader.join(60)
    assert got == [b"plan"]
    assert pipe.is_fifo()
