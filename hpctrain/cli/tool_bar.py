"""The bar that shows how far a tool for data sets is."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hpctrain.train.console import Bar, make_console

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


class ToolBar(Bar):
    """Shows the share of rank 0, which stands for all: shares are alike."""

    def __init__(self, what: str, comm: "Communicator | None") -> None:
        """Show nothing yet.

        Args:
            what: is done, such as ``checking``.
            comm: ranks that do it; None for one alone.
        """
        super().__init__(
            make_console(shown=comm is None or comm.rank == 0),
            TextColumn(what),
            BarColumn(),
            TaskProgressColumn(),
            TimeRemainingColumn(),
        )

    def start(self, total: int) -> Callable[[int], None]:
        """Begin anew; return what moves on, from any thread."""
        for old in self._bar.task_ids:
            self._bar.remove_task(old)
        task = self._bar.add_task("", total=total)

        def advance(some: int) -> None:
            self._bar.advance(task, some)

        return advance
