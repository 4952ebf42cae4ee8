"""The bar that shows how far a tool for data sets is; silent where there is no terminal."""

import shutil
import sys
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


class ToolBar:
    """Shows the share of rank 0, which stands for all: shares are alike."""

    def __init__(self, what: str, comm: "Communicator | None") -> None:
        """Show nothing yet.

        Args:
            what: is done, such as ``checking``.
            comm: ranks that do it; None for one alone.
        """
        console = _console(shown=comm is None or comm.rank == 0)
        self._bar = Progress(
            TextColumn(what),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )

    def start(self, total: int) -> Callable[[int], None]:
        """Begin anew; return what moves on, from any thread."""
        for old in self._bar.task_ids:
            self._bar.remove_task(old)
        task = self._bar.add_task("", total=total)

        def advance(some: int) -> None:
            self._bar.advance(task, some)

        return advance

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


def _console(*, shown: bool) -> Console:
    # mpirun gives its ranks pseudo-terminals without a width even when its own output goes to a
    # file, so only what has a width counts as a terminal.
    width = shutil.get_terminal_size((0, 0)).columns
    return Console(quiet=not shown, force_terminal=sys.stdout.isatty() and width > 0)
