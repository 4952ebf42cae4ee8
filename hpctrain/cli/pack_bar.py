"""The bar that shows how far this rank's packing is."""

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from hpctrain.train.console import Bar


class PackBar(Bar):
    """Shows the share of rank 0, which stands for all: shares are alike."""

    def __init__(self, console: Console) -> None:
        """Show nothing yet: first the source is examined."""
        super().__init__(
            console,
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f} samples"),
            TimeRemainingColumn(),
        )
        self._task = self._bar.add_task("examining", total=None)

    def start(self, total: int | None, done: int) -> None:
        """Begin with ``done`` of ``total`` samples; without a total the bar swings."""
        self._bar.update(self._task, description="packing", total=total, completed=done)

    def advance(self, num_samples: int) -> None:
        """Move on."""
        self._bar.advance(self._task, num_samples)
