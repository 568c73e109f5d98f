"""What a browser shows of the page of a plan, and what it lets people do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from remat.plans import Plan
from remat.report.changes import change
from remat.report.html import page_html, subject_of, write_page
from remat.report.html_data import Subject
from remat.solvers.problem import Link, Problem
from remat.solvers.schedule import Schedule, Timeline, decisions
from remat.solvers.simulate import simulate
from remat.step_plan import StepPlan
from tests.remat.browser import Browser, Tab, find_browser, running
from tests.remat.random_plans import LINK, nested_plan, offloading_schedule
from tests.remat.test_html import HOSTILE, with_hostile_names

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        pytest.skip("there is no Chromium on this machine")
    with running(path, tmp_path_factory.mktemp("profile")) as started:
        yield started


def _open(browser: Browser, plan: Plan | StepPlan | Subject, folder: Path, **kind: Any) -> Tab:
    if isinstance(plan, Subject):
        write_page(folder / "plan.html", plan)
    else:
        plan.to_html(folder / "plan.html")
    tab = Tab(browser, folder / "plan.html", **{"width": 1200, **kind})
    tab.wait_for("document.documentElement.dataset.ready !== undefined")
    assert tab.complaints() == []
    return tab


def test_names_from_a_model_are_shown_as_text(browser: Browser, plan: Plan, tmp_path: Path) -> None:
    tab = _open(browser, with_hostile_names(plan), tmp_path)
    assert tab.evaluate("document.title") == f"remat plan: {HOSTILE}"
    assert tab.evaluate("document.querySelectorAll('script').length") == 2
    assert HOSTILE in tab.evaluate("document.querySelector('#decisions tbody').textContent")


@pytest.mark.parametrize(
    ("seed", "link"), [(0, None), (1, None), (2, LINK), (3, LINK), (4, Link(math.inf, math.inf))]
)
def test_the_page_and_the_judge_agree_on_every_change(
    browser: Browser, tmp_path: Path, seed: int, link: Link | None
) -> None:
    plan = nested_plan(seed)
    schedule = plan.solution.schedule if link is None else offloading_schedule(plan)
    timeline = simulate(plan.problem, schedule, link)
    solution = dataclasses.replace(plan.solution, schedule=schedule, timeline=timeline)
    subject = dataclasses.replace(subject_of(plan), solution=solution, link=link)
    tab = _open(browser, subject, tmp_path)
    assert tab.evaluate("document.getElementById('alarm').hidden")
    _check_timeline(tab, "before", plan.baseline, plan.baseline_timeline)
    _check_timeline(tab, "after", schedule, timeline)
    stacked = "[...c.held].every(([at, of]) => of.reduce((a, b) => a + b) === c.run.bytes[at])"
    assert tab.evaluate(f"page.charts.every((c) => {stacked})"), "the layers make up the bytes"
    rows = tab.evaluate(
        "page.data.decisions.map(([v, a]) => change(page.problem, page.after, v, a))"
    )
    expected = decisions(plan.problem, schedule)
    assert len(rows) == len(expected) > 3
    for row, (value, decision) in zip(rows, expected.items(), strict=True):
        other = change(plan.problem, schedule, value, decision, link)
        assert ("refused" in row) == (other.timeline is None)
        if other.timeline is not None:
            assert row["peak"] == other.timeline.peak
            assert row["seconds"] == pytest.approx(other.timeline.seconds - timeline.seconds)


def _check_timeline(tab: Tab, name: str, schedule: Schedule, timeline: Timeline) -> None:
    assert tab.evaluate(f"page.{name}.peak") == timeline.peak
    assert tab.evaluate(f"page.{name}.seconds") == pytest.approx(timeline.seconds)
    shown = f"[...page.{name}.bytes].filter((_, at) => page.{name}.steps[at] % 5 !== 1)"
    assert tab.evaluate(shown) == [
        used
        for step, used in zip(schedule.steps, timeline.bytes, strict=True)
        if step.kind != "free"
    ]


def test_a_whole_step_is_drawn(browser: Browser, step_plan: StepPlan, tmp_path: Path) -> None:
    tab = _open(browser, step_plan, tmp_path)
    assert tab.evaluate("document.getElementById('alarm').hidden")
    assert tab.evaluate("page.after.peak") == step_plan.peak
    assert tab.evaluate("page.before.peak") == step_plan.baseline_peak
    drawn = tab.evaluate("page.charts[1].marks().map(([, label]) => label)")
    assert drawn[0] == "forward 0"
    assert len(drawn) == 5


def test_a_chart_is_used_by_keyboard(browser: Browser, plan: Plan, tmp_path: Path) -> None:
    tab = _open(browser, plan, tmp_path)
    tab.evaluate("document.getElementById('after').focus()")
    said = "document.getElementById('after').getAttribute('aria-valuetext')"
    tab.press("Home")
    assert tab.evaluate(said) == "1.07 KiB at mm, blocks.0, forward"
    tab.press("ArrowRight")
    assert tab.evaluate(said) == "1.27 KiB at mm, blocks.1, forward"
    tab.press("P", shift=True)
    assert tab.evaluate(said) == "1.38 KiB at expand, (no module), backward"
    tab.press("Home")
    tab.press("p")
    assert tab.evaluate(said) == "1.38 KiB at expand, (no module), backward"
    tab.press("ArrowRight")
    assert tab.evaluate(said) == "1.27 KiB at mm, blocks.0, recomputed in backward"
    assert "Before: 1.37 KiB" in tab.evaluate(
        "document.getElementById('before-readout').textContent"
    ), "where an op runs again, the other chart waits at the backward op that follows"
    tab.press("End")
    assert tab.evaluate(said).endswith("blocks.0, backward")
    assert tab.evaluate("page.held")
    tab.press("Escape")
    assert not tab.evaluate("page.held"), "the mouse is heard again"


def test_pointing_at_a_chart_shows_what_is_alive(
    browser: Browser, plan: Plan, tmp_path: Path
) -> None:
    tab = _open(browser, plan, tmp_path)
    box = tab.evaluate("(({x, y, width}) => [x, y, width])(before.getBoundingClientRect())")
    start = box[0] + 72
    tab.mouse(start + 5, box[1] + 60)
    assert tab.evaluate("document.querySelector('#before-readout code').textContent") == "mm"
    alive = tab.evaluate("document.querySelector('#before-readout ul').innerText")
    assert "1000 B" in alive
    assert "100 B" in alive
    assert "blocks.0, waits for backward" in alive
    tab.mouse(start + 5, box[1] + 60, click=True)
    tab.mouse(box[0] + box[2] / 2, box[1] + 60)
    held = tab.evaluate("document.querySelector('#before-readout ul').innerText")
    assert held == alive, "a click holds the cursor"


def test_decisions_are_searched_sorted_and_explained(
    browser: Browser, plan: Plan, tmp_path: Path
) -> None:
    tab = _open(browser, plan, tmp_path)
    names = "[...document.querySelectorAll('#decisions tbody button')].map((b) => b.textContent)"
    tab.wait_for("!document.querySelector('#decisions tbody').textContent.includes('…')")
    assert tab.evaluate(names) == ["b", "a"]
    tab.evaluate("document.querySelector('[data-by=name]').focus()")
    tab.press("Enter")
    assert tab.evaluate(names) == ["a", "b"]
    assert tab.evaluate("document.querySelector('th').getAttribute('aria-sort')") == "ascending"
    cells = tab.evaluate("[...document.querySelectorAll('tbody td')].map((c) => c.textContent)")
    assert cells[:8] == [
        "a", "blocks.0", "m.py:10", "100 B", "recompute", "+1.00 s", "+100 B (over)", "−1.00 s"
    ]  # fmt: skip
    tab.evaluate("document.querySelector('[data-by=time]').click()")
    tab.wait_for(f'JSON.stringify({names}) === \'["b","a"]\'')
    tab.evaluate("document.getElementById('search').focus()")
    for key in "blocks.0":
        tab.press(key)
    assert tab.evaluate(names) == ["a"]
    tab.evaluate("document.querySelector('#decisions tbody button').click()")
    chosen = tab.evaluate("document.getElementById('selected').textContent")
    assert chosen.endswith("1 time before, 2 after.")


def test_a_layer_shows_its_own_decisions_and_no_others(
    browser: Browser, plan: Plan, tmp_path: Path
) -> None:
    """``blocks.1`` is a part of the name ``blocks.10`` too, and (no module) of none."""
    ops = tuple(
        dataclasses.replace(op, layer={"blocks.0": "blocks.10.mlp"}.get(op.layer, op.layer))
        for op in plan.problem.ops
    )
    problem = dataclasses.replace(plan.problem, ops=ops)
    tab = _open(browser, dataclasses.replace(plan, problem=problem), tmp_path)
    names = "[...document.querySelectorAll('#decisions tbody button')].map((b) => b.textContent)"
    button = "[...document.querySelectorAll('#graph button')].find((b) => b.textContent === {})"
    tab.evaluate(button.format("'blocks.1'") + ".click()")
    assert tab.evaluate(names) == ["b"]
    assert tab.evaluate("document.activeElement.textContent") == "only blocks.1 ✕"
    tab.evaluate(button.format("'blocks.10'") + ".click()")
    assert tab.evaluate(names) == ["a"]
    tab.evaluate(button.format("'(no module)'") + ".click()")
    assert tab.evaluate(names) == []
    tab.press(" ")
    assert tab.evaluate(names) == ["b", "a"]
    assert tab.evaluate("document.getElementById('only').hidden")


@pytest.mark.parametrize("dark", [False, True])
def test_a_phone_shows_it_all(browser: Browser, tmp_path: Path, dark: bool) -> None:
    tab = _open(browser, nested_plan(0), tmp_path, width=375, height=800, dark=dark)
    assert tab.evaluate("document.documentElement.scrollWidth") == 375
    assert tab.evaluate("innerWidth") == 375
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(20, 22, 27)" if dark else "rgb(255, 255, 255)")
    bytes_of = "page.table.found.map((row) => row.bytes)"
    assert tab.evaluate("document.querySelector('th button').offsetParent") is None
    largest = tab.evaluate(bytes_of)
    tab.evaluate("document.getElementById('way').click()")
    assert tab.evaluate(bytes_of) == sorted(largest)
    tab.evaluate("(sort.value = 'bytes', sort.dispatchEvent(new Event('change')))")
    assert tab.evaluate(bytes_of) == largest, "the table is sorted without its head"


def test_everything_is_reached_with_tab(browser: Browser, plan: Plan, tmp_path: Path) -> None:
    tab = _open(browser, plan, tmp_path)
    for _ in range(15):  # the link to the charts, links, two controls, five colours, two charts
        tab.press("Tab")
    assert tab.evaluate("document.activeElement.id") == "after"
    reachable = tab.evaluate(
        "[...document.querySelectorAll('a[href], button, input, select, canvas, pre')]"
        ".filter((e) => e.tabIndex === 0).map((e) => e.id || e.textContent.trim())"
    )
    assert {"before", "after", "search", "action", "bytes", "a", "modules"} <= set(reachable)
    unnamed = tab.evaluate(
        "[...document.querySelectorAll('button, input, select, canvas')].filter((e) => "
        "!(e.textContent.trim() || e.getAttribute('aria-label') || e.labels?.length)).length"
    )
    assert unnamed == 0


def test_a_disagreement_is_said(browser: Browser, plan: Plan, tmp_path: Path) -> None:
    """The page has its own copy of the judge; should they ever differ, nobody is misled."""
    text = page_html(subject_of(plan)).replace('"baseline":1508', '"baseline":1509')
    (tmp_path / "wrong.html").write_text(text, encoding="utf-8")
    tab = Tab(browser, tmp_path / "wrong.html", width=1200)
    said = tab.evaluate("document.getElementById('alarm').innerText")
    assert "disagrees with the plan (before: 1.47 KiB here, 1.47 KiB in the plan)" in said


def test_nested_plans_have_every_decision() -> None:
    """What the tests above are run on is worth it."""
    kinds = {d for seed in range(3) for d in _kinds(nested_plan(seed).problem, nested_plan(seed))}
    assert kinds == {"keep", "recompute"}


def _kinds(problem: Problem, plan: Plan) -> set[str]:
    return {decision.value for decision in decisions(problem, plan.solution.schedule).values()}
