"""Solvers by name."""

from __future__ import annotations

import time

import pytest

from remat.solvers import chain, greedy, mincut, sqrt  # noqa: F401  they register themselves
from remat.solvers.errors import InvalidOption
from remat.solvers.problem import Problem
from remat.solvers.registry import SOLVERS, Proposal, Request, find, register


def test_a_registered_solver_is_found():
    assert find("sqrt") is SOLVERS["sqrt"]
    assert {"sqrt", "chain", "greedy", "mincut"} <= set(SOLVERS)


def test_an_unknown_name_is_refused_with_the_nearest():
    with pytest.raises(InvalidOption, match=r"unknown solver 'sqrtt'; did you mean 'sqrt'\?"):
        find("sqrtt")


def test_a_name_like_no_other_is_refused_with_all_of_them():
    with pytest.raises(InvalidOption, match=r"known: .*chain.*greedy.*sqrt"):
        find("zzzzzz")


def test_register_adds_and_returns_the_function(monkeypatch):
    monkeypatch.setattr("remat.solvers.registry.SOLVERS", {})

    @register("nothing")
    def nothing(request: Request) -> Proposal:
        return Proposal(None)

    assert find("nothing") is nothing


def test_seconds_left_are_never_negative():
    problem = Problem((), ())
    assert Request(problem, None).seconds_left == float("inf")
    assert Request(problem, None, deadline=time.monotonic() - 1).seconds_left == 0.0
