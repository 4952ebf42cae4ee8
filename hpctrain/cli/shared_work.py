"""Work that ranks share in unequal parts: their world, and the bar that shows how far it is."""

import math
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from rich.progress import BarColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn

from hpctrain.core.errors import DataError, MismatchError
from hpctrain.train.console import Bar, make_console

if TYPE_CHECKING:
    from collections.abc import Iterator

    from hpctrain.comm.communicator import Communicator


def joined() -> "Communicator":
    """Join all ranks that were started together, and wait for them as long as they live.

    Collective. A rank that has finished its share waits for the others, for longer than a training
    would: only where ``HPCTRAIN_TIMEOUT`` is set does that wait end. A rank that died is noticed
    at once all the same. Raises ``ConfigError``: a setting is not valid. ``LaunchError``: the
    launcher, the MPI library and the world do not fit together.
    """
    from hpctrain.core.config import Settings, given  # noqa: PLC0415
    from hpctrain.runtime import initialization, world  # noqa: PLC0415

    settings = Settings.from_env()
    if "timeout" not in given():
        settings = replace(settings, timeout=math.inf)
    initialization.join(settings)
    return world.current().comm


@contextmanager
def ranks() -> "Iterator[Communicator | None]":
    """Join the ranks that were started together; None for a process alone, which loads no MPI.

    Raises ``MismatchError``: a DataError left the block, on all ranks: one of them tells it, and
    no rank ends the others.
    """
    from hpctrain.cluster.env import launched  # noqa: PLC0415

    found = launched()
    if found is None or found.size == 1:
        yield None
        return
    comm = joined()
    try:
        yield comm
    except DataError as error:
        raise MismatchError(str(error)) from error


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
