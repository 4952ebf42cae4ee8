"""The console of a rank, and a bar on it that is there for the time of a block."""

import shutil
import sys
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn


def make_console(*, shown: bool) -> Console:
    """A console on stdout; one that is not ``shown`` swallows everything.

    mpirun gives its ranks pseudo-terminals without a width even when its own output goes to a
    file, so only what has a width counts as a terminal.
    """
    width = shutil.get_terminal_size((0, 0)).columns
    terminal = sys.stdout.isatty() and width > 0
    return Console(
        quiet=not shown,
        force_terminal=terminal,
        width=width if terminal else 100,
        highlight=False,
        markup=False,
    )


class Bar:
    """Base of the bars: silent where there is no terminal, and gone at the end of its block."""

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        """Show nothing yet."""
        self._bar = Progress(
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )

    def __enter__(self) -> Self:
        """Show the bar."""
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove it."""
        self._bar.stop()
