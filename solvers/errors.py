"""The errors remat raises. They stand on the ground floor because every floor raises them."""

from __future__ import annotations


class RematError(Exception):
    """Base class of every error remat raises on purpose."""


class InvalidOption(RematError, ValueError):
    """An option, a budget or an argument that cannot mean anything."""


class InvalidProblem(RematError, ValueError):
    """A problem (or a problem file) that no training step can have; names the offender."""


class InvalidSchedule(RematError, ValueError):
    """A schedule the judge refuses: an unmet dependency, a lost output, an op out of order."""


class CaptureError(RematError):
    """The training step could not be captured as one graph that remat can plan."""


class PlanMismatch(RematError):
    """A stored plan was offered to another graph; the message says what differs."""


class BudgetTooSmall(RematError):
    """No schedule was found that fits the memory budget.

    Attributes:
        memory_budget: the budget that was asked for, in bytes.
        least_peak: the smallest peak a plan was found for, in bytes.
        peak_lower_bound: no schedule of the class can peak below this, in bytes (proven).
    """

    def __init__(
        self, message: str, *, memory_budget: int, least_peak: int, peak_lower_bound: int
    ) -> None:
        super().__init__(message)
        self.memory_budget = memory_budget
        self.least_peak = least_peak
        self.peak_lower_bound = peak_lower_bound

    def __reduce__(self) -> tuple[object, ...]:
        figures = (self.memory_budget, self.least_peak, self.peak_lower_bound)
        return (_rebuild_budget_too_small, (str(self), *figures))


def _rebuild_budget_too_small(
    message: str, memory_budget: int, least_peak: int, peak_lower_bound: int
) -> BudgetTooSmall:
    return BudgetTooSmall(
        message,
        memory_budget=memory_budget,
        least_peak=least_peak,
        peak_lower_bound=peak_lower_bound,
    )
