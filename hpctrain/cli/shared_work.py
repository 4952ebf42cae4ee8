"""Context for commands that divide their work among the ranks of a launch, with a progress bar."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hpctrain.cluster.env import launched
from hpctrain.core.errors import DataError, MismatchError
from hpctrain.runtime import tool_ranks
from hpctrain.train.console import Bar, make_console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.comm.communicator import Communicator


@contextmanager
def ranks(verb: str) -> "Iterator[tuple[Communicator | None, ToolBar]]":
    """Connect the ranks of the launch; yield the communicator and a progress bar.

    A process without other ranks gets None as communicator and does not load MPI.

    Raises:
        MismatchError: the block raised a ``DataError`` on all ranks; the caller reports it once,
            on rank 0.
    """
    found = launched()
    comm = tool_ranks.join() if found is not None and found.size > 1 else None
    try:
        with ToolBar(verb, comm) as bar:
            yield comm, bar
    except DataError as error:
        if comm is None:
            raise
        raise MismatchError(str(error)) from error


class ToolBar(Bar):
    """Progress bar on rank 0. It shows the work of rank 0; all ranks have equal shares of work."""

    def __init__(self, verb: str, comm: "Communicator | None") -> None:
        # The amount of work is unknown before ``start``, so the bar has no length.
        super().__init__(
            make_console(shown=comm is None or comm.rank == 0),
            TextColumn(verb),
            BarColumn(),
            TaskProgressColumn(text_format_no_percentage="{task.completed:.0f}"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("", total=None)

    def start(self, total: int | None, done: int = 0) -> Callable[[int], None]:
        """Start the bar at ``done`` of ``total``; without ``total`` the bar has no length.

        Returns:
            A function that advances the bar by an amount; any thread may call this function.
        """
        self._bar.reset(self._task, total=total, completed=done)
        return lambda some: self._bar.advance(self._task, some)
