"""Closed forms to hold exact counts against."""

from __future__ import annotations

from remat.solvers.errors import InvalidOption


def boundary_bytes(
    layers: int, batch: int, sequence: int, hidden: int, bytes_per_element: int
) -> int:
    """Bytes of one stored boundary per layer of a transformer.

        layers * batch * sequence * hidden * bytes_per_element

    A boundary is what enters a layer: the residual stream, of batch x sequence x hidden elements.
    With only the boundaries stored, a layer's inner values are recomputed from its own when
    backward arrives there (Chen, Xu, Zhang, Guestrin 2016, one segment a layer), so this is the
    memory of full activation checkpointing, without the one layer that is being recomputed.

    >>> boundary_bytes(32, 1, 8192, 4096, 2) // 2**20
    2048

    Args:
        layers, batch, sequence, hidden: sizes, at least 1.
        bytes_per_element: 2 for bfloat16 and float16, 4 for float32.

    Raises:
        InvalidOption: a size is below 1.
    """
    sizes = {
        "layers": layers,
        "batch": batch,
        "sequence": sequence,
        "hidden": hidden,
        "bytes_per_element": bytes_per_element,
    }
    for name, size in sizes.items():
        if size < 1:
            raise InvalidOption(f"{name} is {size}; it must be at least 1")
    return layers * batch * sequence * hidden * bytes_per_element
