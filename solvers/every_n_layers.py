"""``every_n_layers``: checkpoint layers 1, N + 1, 2N + 1, ... and keep everything else.

What people do by hand, and what the Hugging Face option of this name does: a checkpointed layer
keeps only the values that enter or leave it, and is recomputed as a whole when its backward
begins (Chen et al. 2016 with one segment a layer). It looks at no budget: the judge says whether
the plan fits.

With a link, what enters or leaves a checkpointed layer is offloaded instead of kept, beside the
computation, and comes back just before it is needed. What is not gone by then stays, and so does
what would take longer than the step to copy. Computation waits for copies where the budget demands.

A layer is a member of a repeated block, read off the module path of each op: the outermost
numeric index that takes at least two values, ``transformer.h.0``, ``model.layers.3``. Several
stacks (encoder and decoder) are counted apart.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final

from remat.solvers.demand import always_kept
from remat.solvers.errors import InvalidOption
from remat.solvers.problem import Problem
from remat.solvers.registry import Proposal, Request, register
from remat.solvers.schedule import Schedule
from remat.solvers.segments import NEVER, Demands, replay
from remat.solvers.structure import Structure
from remat.solvers.transfers import Trace, with_transfers

_SUBSCRIPT: Final = re.compile(r"\[['\"]?(\d+)['\"]?\]")  # ``layers[3]``, ``_modules['3']``


@register("every_n_layers")
def solve_every_n_layers(request: Request) -> Proposal:
    """The plan for ``request.every_n_layers``.

    Raises:
        InvalidOption: N is not an int >= 1, or no block of the model repeats.
    """
    problem, every = request.problem, request.every_n_layers
    if not isinstance(every, int) or isinstance(every, bool) or every < 1:
        raise InvalidOption(f"every_n_layers is {every!r}; it must be an int >= 1, such as 2")
    blocks = repeated_blocks(problem.ops[index].layer for index in problem.forward)
    if not blocks:
        raise InvalidOption(
            "every_n_layers needs a model with repeated layers, but none of the "
            f"{len(problem.forward)} forward ops lies in a numbered module such as "
            "'model.layers.0' that has a sibling; use another solver, such as 'auto'"
        )
    chosen = {block for members in blocks.values() for block in members[::every]}
    block = _block_of_ops(problem, blocks)
    held_from, recompute_at = checkpoint(problem, block, chosen)
    computes = replay(problem, held_from, recompute_at)
    if request.link is None:
        return Proposal(Schedule.from_computes(problem, computes))
    structure = Structure(problem, offloads=True)
    borders = [v for v in _borders(problem, block, chosen) if held_from[v] == 0]
    most = structure.required_seconds
    away = {v for v in borders if request.link.seconds(problem.values[v].bytes) <= most}
    trace = Trace.of(structure, computes)
    return Proposal(with_transfers(trace, away, request.link, request.memory_budget).schedule())


def repeated_blocks(layers: Iterable[str]) -> dict[str, list[str]]:
    """Stacks of repeated blocks: ``{"model.layers": ["model.layers.0", "model.layers.1", ...]}``.

    Args:
        layers: module paths, such as ``"L['self'].model.layers.0.mlp"``.
    """
    paths = {tuple(_parts(layer)) for layer in layers}
    members: dict[tuple[str, ...], set[int]] = {}
    for path in paths:
        for depth, part in enumerate(path):
            if part.isdigit():
                members.setdefault(path[:depth], set()).add(int(part))
    repeated = {stack for stack, numbers in members.items() if len(numbers) >= 2}
    return {
        ".".join(stack): [".".join((*stack, str(number))) for number in sorted(members[stack])]
        for stack in sorted(repeated)
        if not any(stack[:depth] in repeated for depth, part in enumerate(stack) if part.isdigit())
    }


def _parts(layer: str) -> list[str]:
    return [part for part in _SUBSCRIPT.sub(r".\1", layer).split(".") if part]


def _block_of_ops(problem: Problem, blocks: dict[str, list[str]]) -> list[str]:
    """For each op the block it lies in, "" for none; backward and deferred ops lie in none."""
    known = {block for members in blocks.values() for block in members}
    found = [""] * len(problem.ops)
    for index in problem.forward:
        parts = _parts(problem.ops[index].layer)
        for depth, part in enumerate(parts):
            prefix = ".".join(parts[: depth + 1])
            if part.isdigit() and prefix in known:
                found[index] = prefix
                break
    return found


def _borders(problem: Problem, block: Sequence[str], chosen: set[str]) -> set[int]:
    """The values that enter or leave a chosen block."""
    borders: set[int] = set()
    for index in problem.forward:
        for v in problem.ops[index].reads:
            maker = problem.producer[v]
            if maker >= 0 and block[maker] != block[index]:
                borders |= {v} if {block[maker], block[index]} & chosen else set()
    return borders


def checkpoint(
    problem: Problem, block: Sequence[str], chosen: set[str]
) -> tuple[list[int], dict[int, list[int]]]:
    """Arguments of :func:`replay` that checkpoint the blocks in ``chosen`` and keep the rest."""
    kept, demands = always_kept(problem), Demands.of(problem)
    crosses = [False] * len(problem.values)
    for index in problem.forward:
        for v in problem.ops[index].reads:
            maker = problem.producer[v]
            crosses[v] = crosses[v] or (maker >= 0 and block[maker] != block[index])
    inside: dict[str, list[int]] = {name: [] for name in chosen}
    for index in problem.forward:
        if block[index] in chosen:
            inside[block[index]] += [
                v for v in problem.ops[index].writes if not kept[v] and not crosses[v]
            ]
    held_from, recompute_at = [0] * len(problem.values), dict[int, list[int]]()
    for values in inside.values():
        needed = [v for v in values if demands.last[v] >= 0]
        begins = min((demands.first[v] for v in needed), default=NEVER)
        for v in values:
            held_from[v] = NEVER
        for v in needed:
            held_from[v] = begins + 1
        recompute_at.setdefault(begins, []).extend(needed)
    return held_from, recompute_at
