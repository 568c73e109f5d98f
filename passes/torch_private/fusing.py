"""Private torch: inductor's choice of what to fuse, held to the order a graph was emitted in.

Two ops that read the same value share a kernel if inductor may choose; where a plan computes a
value twice, early and late, that makes both early and holds the second until it is wanted. So ops
that only share an input are fused if no library call lies between them. A sum that is added to
another one much later (the gradient of a weight that is used twice) would be fused with the
addition and hold what it sums up until then; so what reads a value is fused with what makes it if
it waits for no library call that comes after.
"""

from __future__ import annotations

import bisect
import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch._inductor.virtualized import V


@contextlib.contextmanager
def held_apart() -> Iterator[None]:
    """Have inductor fuse no two ops that a library call lies between, in this thread."""
    # A handler, because the class in inductor's configuration is looked up once for a thread.
    usual = type(V.choices)
    with V.set_choices_handler(type("HeldApart", (_HeldApart, usual), {})()):
        yield


class _HeldApart:
    """Mixed into whatever chooses otherwise."""

    @classmethod
    def can_fuse_horizontal(
        cls, scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        """Whether two ops, neither of which reads the other, may share a kernel."""
        calls = _library_calls(scheduler)
        first, second = _segments(calls, node1), _segments(calls, node2)
        if max(first[0], second[0]) > min(first[1], second[1]):
            return False
        usual: Any = super()
        return bool(usual.can_fuse_horizontal(scheduler, node1, node2, shared_data_score))

    @classmethod
    def can_fuse_vertical(
        cls, scheduler: Any, node1: Any, node2: Any, shared_data_score: int
    ) -> bool:
        """Whether ``node2``, which reads what ``node1`` makes, may share its kernel."""
        waits = _waits_for(scheduler)
        place = max(node1.min_order, *(waits[node.get_name()] for node in node1.get_nodes()))
        if any(waits[node.get_name()] > place for node in node2.get_nodes()):
            return False
        usual: Any = super()
        return bool(usual.can_fuse_vertical(scheduler, node1, node2, shared_data_score))


_CALLS: weakref.WeakKeyDictionary[Any, list[int]] = weakref.WeakKeyDictionary()
_WAITS: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()


def _library_calls(scheduler: Any) -> list[int]:
    """Where the library calls stand in the order before anything was fused."""
    if scheduler not in _CALLS:
        _CALLS[scheduler] = sorted(_places_of_calls(scheduler).values())
    return _CALLS[scheduler]


def _waits_for(scheduler: Any) -> dict[str, int]:
    """For each op, the place of the last library call it cannot run before; -1 if there is none."""
    if scheduler not in _WAITS:
        places = _places_of_calls(scheduler)
        _WAITS[scheduler] = {
            name: max((at for call, at in places.items() if call in node.ancestors), default=-1)
            for name, node in scheduler.name_to_node.items()
        }
    return _WAITS[scheduler]


def _places_of_calls(scheduler: Any) -> dict[str, int]:
    return {
        name: node.min_order
        for name, node in scheduler.name_to_node.items()
        # Nodes that were dead have no place in the order.
        if (node.is_extern() or node.is_template()) and hasattr(node, "min_order")
    }


def _segments(calls: list[int], node: Any) -> tuple[int, int]:
    """How many library calls stand before the node's first op and before its last."""
    return bisect.bisect_left(calls, node.min_order), bisect.bisect_left(calls, node.max_order)
