"""Which module, and which source line, a node of the joint graph comes from.

Forward nodes carry ``nn_module_stack``, backward nodes ``fwd_nn_module_stack``. The few per cent
without either (adds of gradients, loss code) inherit from the node that reads them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable

from torch import fx

_SUBSCRIPT = re.compile(r"""\[(?:'([^']*)'|"([^"]*)"|([^\]]*))\]""")
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)')
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_CALLERS_OF_THE_MODEL = {os.path.join(_PACKAGE, name) for name in ("capture.py", "step_trace.py")}
_CELL = re.compile(r"^(?:\w+\.)*__closure__\.\d+\.cell_contents(?:\.|$)")
_PREFIXES = ("L.self.", "L.fn.", "L.model.", "L.", "self.", "G.")


def layers(nodes: Iterable[fx.Node]) -> dict[fx.Node, str]:
    """For every node the path of its module (``"transformer.h.0.attn"``), or ``""``."""
    ordered = list(nodes)
    found = {node: _own_layer(node) for node in ordered}
    for node in reversed(ordered):
        if not found[node]:
            readers = [found[user] for user in node.users if found.get(user)]
            found[node] = readers[0] if readers else ""
    return found


def source_line(node: fx.Node) -> str:
    """``"file.py:12 in forward"`` of the innermost frame that made the node, or ``""``."""
    found = _FRAME.findall(node.meta.get("stack_trace") or "")
    frames = [frame for frame in found if frame[0] not in _CALLERS_OF_THE_MODEL]
    if not frames:
        return ""
    path, line, function = frames[-1]
    return f"{'/'.join(path.split('/')[-2:])}:{line} in {function}"


def normalise(path: str) -> str:
    """``L['self'].transformer.h.0.attn`` or ``L['self']._modules['h']['0']`` as a dotted path."""
    dotted = _SUBSCRIPT.sub(lambda m: "." + (m.group(1) or m.group(2) or m.group(3) or ""), path)
    parts = [part for part in dotted.split(".") if part and part not in ("_modules", "_orig_mod")]
    # A step function finds its model in its closure: that is no part of the model's paths.
    dotted = _CELL.sub("", ".".join(parts))
    for prefix in _PREFIXES:
        if f"{dotted}.".startswith(prefix):
            return dotted[len(prefix) :]
    return dotted


def _own_layer(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return normalise(paths[-1]) if paths else ""
