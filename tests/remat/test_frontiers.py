"""The curve of peak against time, and its picture."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import remat
import remat.frontiers
from remat.cli import DONE, FAILED, main
from remat.report.curve import frontier_curve, knee_of
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
    assert len(str(curve).splitlines()) == 3 + len(curve.points) + (curve.knee is not None)
    curve.save_svg(tmp_path / "curve.svg")
    root = ElementTree.parse(tmp_path / "curve.svg").getroot()
    dots = [item for item in root.iter() if item.get("class") == "dot"]
    assert len(dots) == len(curve.points)
    assert not [item for item in root.iter() if "href" in " ".join(item.attrib)]


def test_a_curve_of_one_height_can_be_drawn() -> None:
    picture = frontier_svg([(1024, 0.0, 0.0), (2048, 0.0, 0.0)], 2048)
    assert ElementTree.fromstring(picture).tag.endswith("svg")
    assert frontier_curve([(1024, 0.0, 0.0), (2048, 0.0, 0.0)], 2048)


def test_a_curve_of_one_point_or_none_can_be_drawn(curve: remat.frontiers.Frontier) -> None:
    picture = frontier_svg([(2048, 0.0, 0.0)], 2048)
    assert picture.count("\n2.00 KiB</text>") == 1, "labels in one place are one label"
    empty = replace(curve, points=())
    assert empty.knee is None
    assert "no plan was found for any budget" in str(empty)
    assert "B" in empty.plot().splitlines()[-3]


def test_a_knee_at_the_right_is_named_towards_the_middle() -> None:
    rows = [(100, 1.0, 0.0), (900, 0.01, 0.0), (1000, 0.0, 0.0)]
    root = ElementTree.fromstring(frontier_svg(rows, 1000, knee=1))
    (name,) = [
        item for item in root.iter() if (item.text or "").startswith("knee") and item.get("x")
    ]
    assert name.get("text-anchor") == "end"


@pytest.mark.parametrize(
    ("points", "knee"),
    [
        ([(0, 1.0), (1, 0.1), (10, 0.0)], 1),
        ([(0, 1.0), (2, 0.5), (3, 0.1), (10, 0.0)], 2),
        ([(0, 1.0), (5, 0.5), (10, 0.0)], None),  # a straight line bends nowhere
        ([(0, 1.0), (5, 0.9), (10, 0.0)], None),  # above the chord
        ([(0, 1.0), (10, 0.0)], None),
        ([(0, 0.0), (5, 0.0), (10, 0.0)], None),
        ([], None),
    ],
)
def test_the_knee(points: list[tuple[int, float]], knee: int | None) -> None:
    assert knee_of(points) == knee


@given(
    st.lists(st.tuples(st.integers(1, 999), st.integers(1, 999)), min_size=3, max_size=9),
    st.integers(1, 1000),
    st.floats(0.01, 100),
)
def test_the_knee_does_not_depend_on_the_units(
    steps: list[tuple[int, int]], scale: int, factor: float
) -> None:
    points = [(0, 0)]
    for right, down in steps:
        points.append((points[-1][0] + right, points[-1][1] - down))
    here = knee_of(points)
    there = knee_of([(7 + x * scale, y * factor) for x, y in points])
    if here is not None and there is not None:
        right, bottom = points[-1]
        distances = [1 - a / right - (b - bottom) / (0 - bottom) for a, b in points]
        assert distances[there] == pytest.approx(distances[here])


def test_the_knee_is_marked(curve: remat.frontiers.Frontier, tmp_path: Path) -> None:
    peaks = [(100, 1.0), (200, 0.1), (400, 0.0)]
    points = tuple(
        replace(curve.points[0], peak=peak, memory_budget=peak, extra_time=extra)
        for peak, extra in peaks
    )
    bent = replace(curve, points=points)
    assert bent.knee == points[1]
    assert "knee: 200 B (200 bytes) for +10.00% time" in str(bent)
    assert sum(line.count("K") for line in bent.plot().splitlines()[1:-2]) == 1
    bent.save_svg(tmp_path / "curve.svg")
    assert 'class="knee"' in (tmp_path / "curve.svg").read_text()


def test_the_curve_in_characters() -> None:
    lines = frontier_curve([(100, 1.0, 0.9), (200, 0.1, 0.1), (400, 0.0, 0.0)], 400, 1)
    assert all(len(line) <= 80 for line in lines)
    body = lines[1:-2]
    assert body[0].startswith("+100.0% |o")
    assert body[-1].rstrip().endswith("B")
    assert sum(line.count("o") for line in body) == 1  # the knee and the baseline hide the others


def test_the_command_prints_curve_and_table(
    curve: remat.frontiers.Frontier,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "step_of_a_user_here.py").write_text("def make(): return print, ()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    asked: list[int] = []

    def planned(*_: object, points: int, **__: object) -> remat.frontiers.Frontier:
        asked.append(points)
        return curve

    monkeypatch.setattr(remat.frontiers, "frontier", planned)
    line = ["frontier", "step_of_a_user_here:make", "--points", "4", "-o", str(tmp_path / "c.svg")]
    assert main(line) == DONE
    assert asked == [4]
    assert capsys.readouterr().out == f"{curve.plot()}\n\n{curve}\n"
    assert (tmp_path / "c.svg").exists()
    assert main(line) == FAILED  # the picture is there already
    assert asked == [4]


def test_a_budget_has_no_meaning_here() -> None:
    with pytest.raises(InvalidOption, match="every budget"):
        remat.frontier(Net(), (torch.randn(2, 64),), memory_budget=0.5)


def test_one_point_is_no_curve_and_nothing_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remat.frontiers, "plan", lambda *_, **__: pytest.fail("captured"))
    with pytest.raises(InvalidOption, match="points is 1; a frontier has at least 2, its two ends"):
        remat.frontier(Net(), (torch.randn(2, 64),), points=1)
