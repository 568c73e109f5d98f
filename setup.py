"""Lists the packages of the three layers; everything else is in pyproject.toml.

No declarative finder of setuptools knows that ``passes/`` is installed as ``remat.passes``, and the
links ``remat/passes`` and ``remat/solvers`` must not be followed: an sdist does not hold them.
"""

from setuptools import find_packages, setup

LAYERS = ("passes", "solvers")

face = find_packages(
    include=["remat", "remat.*"], exclude=[f"remat.{x}{y}" for x in LAYERS for y in ("", ".*")]
)
layers = find_packages(include=[f"{x}{y}" for x in LAYERS for y in ("", ".*")])
setup(packages=[*face, *(f"remat.{name}" for name in layers)])
