"""The script that checks a GPU, as far as a CPU can run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import cuda_check
from benchmarks.cuda_check import LLAMA, ROWS, Result, Row, main, table
from benchmarks.cuda_check_models import build, relative_error


def test_a_row_is_run_once_and_found_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--device", "cpu", "--tiny", "--out", str(tmp_path), "--only", "gpt2-124m plain"]
    assert main(arguments) == 0
    (line,) = (tmp_path / "cuda_check.jsonl").read_text().splitlines()
    found = json.loads(line)
    assert (found["error"], found["gradient_error"]) == ("", 0.0)
    assert found["allocated"] > 0
    assert "| gpt2-124m plain |" in capsys.readouterr().out
    monkeypatch.setattr(cuda_check, "run_row", lambda *_: pytest.fail("it is known already"))
    assert main(arguments) == 0
    assert "torch" in found["machine"]
    assert "tiny models" in found["machine"]

    def another(row: Row, *_: object) -> Result:
        return Result(row.key, "another")

    monkeypatch.setattr(cuda_check, "run_row", another)
    monkeypatch.setattr(cuda_check, "described_machine", lambda *_: "another")
    assert main(arguments) == 0  # a row of another machine, or of tiny models, is none of this one
    lines = (tmp_path / "cuda_check.jsonl").read_text().splitlines()
    assert [json.loads(line)["machine"] == "another" for line in lines] == [False, True]


def test_a_row_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--device", "cpu", "--tiny", "--out", str(tmp_path), "--only", "gpt2 plain"])
    assert "'gpt2 plain' means no row" in capsys.readouterr().err


def test_no_row_is_begun_that_may_not_end_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cuda_check, "run_row", lambda *_: pytest.fail("there is no time for it"))
    assert main(["--device", "cpu", "--tiny", "--out", str(tmp_path), "--seconds", "10"]) == 0
    assert "no time was left for" in capsys.readouterr().out


def test_a_row_that_fails_does_not_end_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(cuda_check, "prepare", fails)
    arguments = ["--device", "cpu", "--tiny", "--out", str(tmp_path), "--only", "checkpoint"]
    assert main(arguments) == 0
    results = [json.loads(x) for x in (tmp_path / "cuda_check.jsonl").read_text().splitlines()]
    assert {r["error"] for r in results} == {"RuntimeError: no kernel image"}
    assert "no kernel image" in table([Result(**results[0])])


def test_rows_differ_and_what_needs_a_gpu_is_left_out_on_a_cpu() -> None:
    keys = [row.key for row in ROWS]
    assert len(set(keys)) == len(keys)
    methods = {row.method for row in ROWS if row.needs_cuda}
    assert methods >= {"step cudagraph", "remat cudagraph", "remat eager offload"}
    assert ROWS[0].method == "plain"  # nothing else is worth a second if this fails
    if not torch.cuda.is_available():
        assert main(["--out", "."]) == 1


def test_checkpointed_layers_give_the_same_gradients() -> None:
    found = []
    for checkpointed in (False, True):
        model, batch = build(LLAMA, "cpu", small=True, checkpointed=checkpointed)
        model(*batch).backward()
        found.append([p.grad for p in model.parameters()])
    assert relative_error(*found) == 0.0
    assert relative_error([torch.ones(2)], [torch.tensor([1.0, 0.0])]) > 0.5
