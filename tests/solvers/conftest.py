"""Makes the helpers beside the tests importable by their bare names.

``strategies`` (hypothesis strategies) and ``brute`` (exhaustive optima) are plain modules of this
folder: ``from strategies import problems``. The folder is put on the path here, so that this works
under pytest's ``prepend`` and ``importlib`` import modes alike.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)
