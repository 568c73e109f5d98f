"""What one op costs, as plain data: cost models make it, the lowering reads it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class OpCost:
    """The cost of running one op once.

    Attributes:
        seconds: wall time on the device the plan is for.
        flops: floating point operations (a multiply-add counts two).
        workspace: bytes it allocates and releases while it runs, outputs excluded.
        retained: of the workspace, bytes that are released only with its outputs: a loss that was
            reduced to one number lies in the storage of all the terms it was summed from.
        assumed: the workspace was not measured but assumed to be zero.
    """

    seconds: float
    flops: int = 0
    workspace: int = 0
    assumed: bool = False
    retained: int = 0
