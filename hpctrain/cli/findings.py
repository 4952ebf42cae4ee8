"""Output of ``hpctrain doctor`` for people."""

from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from hpctrain.core.finding import LEVELS, Finding

_STYLES = {"ok": "green", "note": "cyan", "warning": "yellow", "error": "bold red"}
_INDENT = 9


def show(findings: Sequence[Finding], *, verbose: bool) -> None:
    """Print the findings, the worst first, and a line that sums them up; ``verbose`` all of them.

    No line is broken, so that grep finds things; a terminal gets colours.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    shown = [finding for finding in findings if verbose or finding.level != "ok"]
    for finding in sorted(shown, key=lambda each: -LEVELS.index(each.level)):
        level = Text(f"{finding.level:<{_INDENT}}", style=_STYLES[finding.level])
        console.print(level + Text(f"{finding.check}: {finding.what}"))
        if finding.do:
            console.print(Text(f"{'':<{_INDENT}}do: ") + Text(finding.do, style="bold"))
    console.print(summary(findings))


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
