"""The bar that shows how far this rank's packing is; silent where there is no terminal."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class PackBar:
    """Shows the share of rank 0, which stands for all: shares are alike."""

    def __init__(self, console: Console) -> None:
        """Show nothing yet: first the source is examined."""
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f} samples"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )
        self._task = self._bar.add_task("examining", total=None)

    def start(self, total: int | None, done: int) -> None:
        """Begin with ``done`` of ``total`` samples; without a total the bar swings."""
        self._bar.update(self._task, description="packing", total=total, completed=done)

    def advance(self, num_samples: int) -> None:
        """Move on."""
        self._bar.advance(self._task, num_samples)

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
