"""Output of ``hpctrain doctor`` for people."""

import shutil
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hpctrain.core.finding import LEVELS, Finding

MAX_WIDTH = 120
"""Columns of the table on a wide terminal."""

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
_INDENT = 9


def show(findings: Sequence[Finding], *, verbose: bool) -> None:
    """Print the findings, the worst first, and a line that sums them up.

    A file or a pipe gets lines that no table has broken, so that grep finds things.
    """
    shown = [finding for finding in findings if verbose or finding.level != "ok"]
    shown.sort(key=lambda finding: -LEVELS.index(finding.level))
    width = shutil.get_terminal_size((0, 0)).columns
    if sys.stdout.isatty() and width > 0:
        _print_table(shown, min(width, MAX_WIDTH))
    else:
        _print_lines(shown)
    sys.stdout.write(summary(findings) + "\n")


def summary(findings: Sequence[Finding]) -> str:
    """Sum up in a line."""
    counts = {level: sum(f.level == level for f in findings) for level in LEVELS}
    checks = len({finding.check for finding in findings})
    parts = [
        f"{counts[level]} {level}{'s' * (counts[level] != 1)}"
        for level in reversed(LEVELS[1:])
        if counts[level]
    ]
    verdict = "" if counts["warning"] or counts["error"] else "nothing wrong: "
    return ", ".join([f"{verdict}{checks} check{'s' * (checks != 1)}", *parts])


def _print_table(findings: Sequence[Finding], width: int) -> None:
    if not findings:
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in findings:
        text = Text(finding.what)
        if finding.do:
            text.append(f"\n{finding.do}", style="bold")
        table.add_row(Text(finding.level, style=_STYLES[finding.level]), finding.check, text)
    console = Console(width=width, highlight=False, markup=False)
    console.print(table)


def _print_lines(findings: Sequence[Finding]) -> None:
    for finding in findings:
        sys.stdout.write(f"{finding.level:<{_INDENT}}{finding.check}: {finding.what}\n")
        if finding.do:
            sys.stdout.write(f"{'':<{_INDENT}}do: {finding.do}\n")
