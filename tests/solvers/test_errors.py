"""Errors: one base class, figures that survive a pickle."""

from __future__ import annotations

import pickle

import pytest

from remat.solvers import errors
from remat.solvers.errors import BudgetTooSmall, InvalidOption, RematError


def test_every_error_is_a_remat_error():
    found = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(found) >= 7
    assert all(issubclass(kind, RematError) for kind in found)


def test_budget_too_small_carries_its_figures_through_a_pickle():
    # Worker processes of a frontier hand it back.
    error = BudgetTooSmall("too small", memory_budget=1, least_peak=3, peak_lower_bound=2)
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is BudgetTooSmall
    assert str(again) == "too small"
    assert (again.memory_budget, again.least_peak, again.peak_lower_bound) == (1, 3, 2)


def test_a_wrong_option_is_a_value_error():
    with pytest.raises(ValueError, match="no such thing"):
        raise InvalidOption("no such thing")
