"""Plans in torch's own logs. Each case is a fresh interpreter: torch reads the variables once."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import remat
from remat.plan_log import json_lines, log_plan
from remat.plans import Plan, Unplanned

ROOT = Path(__file__).parents[2]
STEP = """
import torch
from torch import nn
import remat
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
    def forward(self, x):
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()
step = remat.compile(Net(), memory_budget=0.0, executor="eager", time_limit=0.2)
for _ in range(2):
    step(torch.randn(64, 32)).backward()
"""


def test_a_line_for_each_plan_and_the_whole_of_it(
    plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="remat")
    log_plan(plan)
    log_plan(Unplanned("nothing trains"))
    assert caplog.messages == [
        "plan: budget 1.42 KiB, peak 1.38 KiB (without remat 1.47 KiB), +10.0 % time",
        "not planned: nothing trains",
    ]
    caplog.clear()
    caplog.set_level(logging.DEBUG, logger="remat")
    log_plan(plan, "remat_step_plan")
    assert caplog.messages[0].startswith("step plan: budget 1.42 KiB")
    assert caplog.messages[1] == str(plan)


def test_json_in_short_lines(plan: Plan) -> None:
    text = json_lines(plan)
    assert Plan.from_json(json.loads(text)) == plan
    assert max(map(len, text.splitlines())) < 200


def test_a_plan_that_nothing_runs_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="remat")
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    loss = torch.Tensor.mean
    torch._dynamo.reset()
    remat.plan(model, (torch.randn(4, 8),), loss=loss, executor="eager")
    assert [message.split(",")[0] for message in caplog.messages] == ["plan: budget none"]


def test_torch_logs_and_torch_trace(tmp_path: Path) -> None:
    """One process for both: starting one costs seconds."""
    variables = {**os.environ, "TORCH_LOGS": "+remat", "TORCH_TRACE": str(tmp_path)}
    command = [sys.executable, "-c", STEP]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    assert sum("] plan: budget " in line for line in lines) == 1
    assert any("] budget     " in line for line in lines)  # the plan itself, line by line
    (trace,) = tmp_path.glob("dedicated_log_torch_trace_*.log")
    lines = trace.read_text().splitlines()
    (start,) = [at for at, line in enumerate(lines) if '"name": "remat_plan"' in line]
    said = json.loads(lines[start][lines[start].index("{") :])
    assert said["artifact"]["encoding"] == "json"
    assert said["frame_id"] == 0  # the graph it belongs to
    payload = []
    for line in lines[start + 1 :]:
        if not line.startswith("\t"):
            break
        payload.append(line[1:])
    traced = Plan.from_json(json.loads("\n".join(payload)))
    assert traced.peak <= traced.baseline_peak
    assert traced.executor == "eager"
