"""Names of layers and source lines, cut to what is shown of them."""

from __future__ import annotations

import re
from typing import Final

_CALL: Final = re.compile(r"call\.\d+(\.|$)")


def block(layer: str, *, several_calls: bool = False) -> str:
    """``transformer.h.3`` for ``transformer.h.3.mlp.act``: a member of a list is a block.

    Args:
        several_calls: the name may begin with that of its call, ``call.1.h.3.mlp``, in which the
            call is no member of a list of modules.
    """
    called = _CALL.match(layer) if several_calls else None
    if called:
        return called[0] + block(layer[called.end() :])
    parts = layer.split(".")
    numbered = [position for position, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else layer


def without_call(layer: str) -> str:
    """``h.3.mlp`` for ``call.1.h.3.mlp``."""
    return _CALL.sub("", layer, count=1) if _CALL.match(layer) else layer


def file_and_line(source: str) -> str:
    """``model.py:42`` for ``folder/model.py:42 in forward``."""
    return source.rsplit(" in ", 1)[0].rsplit("/", 1)[-1]


def printable(text: str) -> str:
    """Without what moves the cursor or ends the line: a module may have any name."""
    return "".join(x if x.isprintable() else "�" for x in text)


def cut_right(text: str, width: int) -> str:
    """At most ``width`` characters, the first ones: what matters stands there."""
    text = printable(text)
    return text if len(text) <= width else text[: width - 1] + "…"


def cut_left(text: str, width: int) -> str:
    """At most ``width`` characters, the last ones: the end of a path tells more."""
    text = printable(text)
    return text if len(text) <= width else "…" + text[len(text) - width + 1 :]
