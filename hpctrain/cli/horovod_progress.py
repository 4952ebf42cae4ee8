"""Progress of the build of Horovod: a bar on a terminal, lines in a file."""

import time
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from hpctrain.core.units import format_seconds
from hpctrain.train.console import make_console

EVERY = 25
"""In a file, a line for so many percent."""


class Show:
    """Shows the running step and, where it is known, its share."""

    def __init__(self) -> None:
        """Show nothing yet."""
        self._console = make_console(shown=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[share]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task: TaskID | None = None
        self._what = ""
        self._start = 0.0
        self._told = 0

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
        self._end(is_done=kind is None)
        self._bar.stop()

    def step(self, what: str) -> None:
        """Begin a step."""
        self._end(is_done=True)
        self._what, self._start, self._told = what, time.monotonic(), 0
        if self._bar.disable:
            self.say(f"{what} ...")
        else:
            self._task = self._bar.add_task(what, total=None, share="")

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._console.print(line, soft_wrap=True)

    def percent(self, done: int) -> None:
        """Move on to ``done`` percent."""
        if self._task is not None:
            self._bar.update(self._task, completed=done, total=100, share=f"{done} %")
        elif done // EVERY > self._told // EVERY:
            self.say(f"{self._what}: {done} % after {self._seconds()}")
        self._told = max(done, self._told)

    def _end(self, *, is_done: bool) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
        if self._what and is_done:
            self.say(f"{self._what}: {self._seconds()}")
        self._what = ""

    def _seconds(self) -> str:
        return format_seconds(time.monotonic() - self._start)
