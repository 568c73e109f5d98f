"""The transfer steps of a schedule become calls of the ops in :mod:`remat.passes.transfers`.

A value is a storage, so what travels is the base that its views lie in; views are computed over the
reloaded base where somebody reads them, as they are over any other instance.

Which values may travel is said in :mod:`remat.passes.lower`: those that a forward op makes and that
nobody outside the graph, and no op in place, ever writes. Owned values (parameters, inputs) and
outputs are none of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import fx

from remat.passes import transfers as _transfers  # noqa: F401  it registers the ops
from remat.passes.lower import Lowered
from remat.solvers.errors import RematError
from remat.solvers.problem import Problem
from remat.solvers.schedule import Schedule, Step

TRANSFER: Final = "remat_transfer"
"""Metadata of an emitted transfer: its step."""

_OPS: Final = torch.ops.remat


@dataclass(frozen=True)
class Place:
    """Where values go.

    Attributes:
        where: ``"host"`` or a directory.
        whole: store all of a value's storage, as a plan of the eager executor counts it. Inductor
            may have made a value a part of some larger buffer.
    """

    where: str
    whole: bool = True


class Emitter:
    """Emits transfers into one graph."""

    def __init__(self, graph: fx.Graph, place: Place | None) -> None:
        self._graph = graph
        self._place = place
        self.tokens: dict[int, fx.Node] = {}
        self._in_flight: dict[int, fx.Node] = {}

    def offload(self, value: int, source: fx.Node) -> fx.Node:
        """Start to copy ``source``; answers the token."""
        if self._place is None:
            raise RematError("the schedule offloads a value, but there is no place to offload to")
        made = self._call("offload", value, (source, self._place.where, self._place.whole))
        made.meta["val"] = token_fake(source)
        self.tokens[value] = made
        return made

    def reload(self, value: int, token: fx.Node, like: fx.Node) -> fx.Node:
        """Start to bring back an instance of the joint graph's node ``like``."""
        fake = like.meta["val"]
        arguments = (token, list(fake.shape), list(fake.stride()), fake.dtype, fake.device)
        made = self._call("reload", value, arguments)
        made.meta = {**like.meta, TRANSFER: made.meta[TRANSFER]}
        self.tokens[value], self._in_flight[value] = token, made
        return made

    def wait(self, value: int, token: fx.Node, instance: fx.Node) -> None:
        """Wait for the copy of a value: from it if it was reloaded, to its room otherwise."""
        reloaded = self._in_flight.pop(value, None)
        name = "wait_offload" if reloaded is None else "wait_reload"
        self._call(name, value, (token, instance if reloaded is None else reloaded), "wait")

    def _call(
        self, name: str, value: int, arguments: tuple[object, ...], kind: str = ""
    ) -> fx.Node:
        node = self._graph.call_function(getattr(_OPS, name).default, arguments)  # type: ignore[arg-type]
        node.meta[TRANSFER] = Step(kind or name, value)  # type: ignore[arg-type]
        return node


def token_fake(node: fx.Node) -> torch.Tensor:
    """The fake value of a token, in the fake mode of a node's value."""
    with node.meta["val"].fake_mode:
        return torch.empty(1, dtype=torch.int64)


def holders(lowered: Lowered) -> dict[int, fx.Node]:
    """Value → the node whose instance is its storage."""
    return {value: lowered.storages.holder[s] for s, value in lowered.value_of.items()}


def offloaded_bytes(problem: Problem, schedule: Schedule) -> tuple[int, ...]:
    """Bytes of each value that the schedule offloads: the rooms it takes at most."""
    offloaded = dict.fromkeys(step.index for step in schedule.steps if step.kind == "offload")
    return tuple(problem.values[value].bytes for value in offloaded)
