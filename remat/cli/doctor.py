"""``remat doctor``: whether remat would work here, and what would not, and why."""

from __future__ import annotations

import argparse
import textwrap
from typing import TYPE_CHECKING, Final

from remat.cli._terminal import print_report, spinner

if TYPE_CHECKING:
    from remat.cli._checks import Check, Finding

NAME: Final = "doctor"
HELP: Final = "look at versions, device, compiler and caches; exit code 1 if something would fail"

WIDTH: Final = 80
_MARKS: Final = {"ok": "ok", "note": "note", "fails": "FAILS"}
_INDENT: Final = 19


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Nothing to choose."""


def run(arguments: argparse.Namespace) -> int:
    """Run every check; 0 if remat would work with its defaults, 1 if something would fail."""
    from remat.cli import _checks

    findings: list[Finding] = []
    for check in _checks.CHECKS:
        name = check.__name__.replace("_", " ")
        with spinner(f"looking at the {name}"):
            findings += _found(check, name)
        # What cannot be imported fails every check after it, and says nothing new.
        if any(f.state == "fails" and f.name in ("python", "torch") for f in findings):
            break
    lines = [line for finding in findings for line in _lines(finding)]
    failing = [finding.name for finding in findings if finding.state == "fails"]
    lines += ["", f"would not work: {', '.join(failing)}" if failing else "remat would work here"]
    print_report("\n".join(lines))
    return 1 if failing else 0


def _found(check: Check, name: str) -> list[Finding]:
    """What a check found; a check that breaks is a finding too, and the others go on."""
    from remat.cli._checks import Finding

    findings: list[Finding] = []
    try:
        for finding in check():
            findings.append(finding)
    except Exception as error:  # noqa: BLE001  whatever is wrong here, doctor is asked what
        complaint = f"could not be looked at: {type(error).__name__}: {error}"
        findings.append(Finding("fails", name, complaint, "report it with this line"))
    return findings


def _lines(finding: Finding) -> list[str]:
    text = finding.text + (f". {finding.remedy}" if finding.remedy else "")
    head = f"{_MARKS[finding.state]:<6} {finding.name:<11} "
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=" " * _INDENT, break_on_hyphens=False
    )
