"""The curve of peak against time, and its picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch
from torch import nn

import remat
import remat.frontiers
from remat.report.svg import frontier_svg
from remat.solvers.errors import InvalidOption


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x.square().mean()


@pytest.fixture(scope="module")
def curve() -> remat.frontiers.Frontier:
    torch._dynamo.reset()
    return remat.frontier(Net(), (torch.randn(512, 64),), points=4, time_limit=0.5)


def test_more_memory_is_never_slower(curve: remat.frontiers.Frontier) -> None:
    assert len(curve.points) == 4
    times = [point.extra_time for point in curve.points]
    assert times == sorted(times, reverse=True)
    assert times[0] > 0
    for point in curve.points:
        assert point.peak <= point.memory_budget
        assert point.least_extra_time <= point.extra_time + 1e-12


def test_the_ends_are_the_least_peak_and_no_saving(curve: remat.frontiers.Frontier) -> None:
    assert curve.points[0].peak < 0.7 * curve.baseline.peak
    assert curve.points[-1].extra_flops == 0


def test_the_table_and_the_picture(curve: remat.frontiers.Frontier, tmp_path: Path) -> None:
    assert all(len(line) <= 80 for line in str(curve).splitlines())
    assert len(str(curve).splitlines()) == 3 + len(curve.points)
    curve.save_svg(tmp_path / "curve.svg")
    root = ElementTree.parse(tmp_path / "curve.svg").getroot()
    dots = [item for item in root.iter() if item.get("class") == "dot"]
    assert len(dots) == len(curve.points)
    assert not [item for item in root.iter() if "href" in " ".join(item.attrib)]


def test_a_curve_of_one_height_can_be_drawn() -> None:
    picture = frontier_svg([(1024, 0.0, 0.0), (2048, 0.0, 0.0)], 2048)
    assert ElementTree.fromstring(picture).tag.endswith("svg")


def test_a_budget_has_no_meaning_here() -> None:
    with pytest.raises(InvalidOption, match="every budget"):
        remat.frontier(Net(), (torch.randn(2, 64),), memory_budget=0.5)
