"""The bar that shows how far packing, or a tool for data sets, is."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hpctrain.train.console import Bar, make_console

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


class ToolBar(Bar):
    """Shows the share of rank 0, which stands for all: shares are alike."""

    def __init__(self, what: str, comm: "Communicator | None") -> None:
        """Swing until it is known how much there is to do."""
        super().__init__(
            make_console(shown=comm is None or comm.rank == 0),
            TextColumn(what),
            BarColumn(),
            TaskProgressColumn(text_format_no_percentage="{task.completed:.0f}"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("", total=None)

    def start(self, total: int | None, done: int = 0) -> Callable[[int], None]:
        """Begin anew with ``done`` of ``total``; without a total the bar swings.

        Returns:
            What moves on, from any thread.
        """
        self._bar.reset(self._task, total=total, completed=done)
        return lambda some: self._bar.advance(self._task, some)
