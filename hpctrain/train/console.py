"""Console of a rank, with progress bars."""

import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Table

from hpctrain.core.python_compat import Self
from hpctrain.core.units import format_bytes

if TYPE_CHECKING:
    from hpctrain.train.scores import Scores
    from hpctrain.train.step_meter import Interval


def make_console(*, shown: bool) -> Console:
    """Return a console on stdout, which prints nothing unless ``shown``.

    The ranks of mpirun have pseudo-terminals even if the output of mpirun goes to a file. These
    have no width, so only a terminal with a width counts as a terminal.
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


def figures(title: str, heads: Iterable[str], rows: Iterable[Iterable[str]]) -> Table:
    """Return a table of numbers with a title."""
    table = Table(title=title, title_justify="left")
    for head in heads:
        table.add_column(head, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


class Bar:
    """Progress bar inside a ``with`` block; displays nothing without a terminal."""

    def __init__(self, console: Console, *columns: ProgressColumn) -> None:
        self._bar = RichProgress(
            *columns,
            console=console,
            transient=True,
            disable=not console.is_terminal or console.quiet,
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()


class Progress(Bar):
    """Displays a progress bar and results of a run on the console of rank 0."""

    def __init__(self, console: Console, num_steps: int, num_epochs: int, metric: str) -> None:
        super().__init__(
            console,
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=None),
            TextColumn("{task.description}"),
            TimeRemainingColumn(),
        )
        self._console = console
        self._num_epochs = num_epochs
        self._metric = metric
        self._of_epoch: Interval | None = None
        self._rounds = ""
        self._bar_task = self._bar.add_task("", total=num_steps)

    def advance(
        self, step: int, interval: "Interval", sync: Mapping[str, Any] | None = None
    ) -> None:
        """Update the progress bar.

        Args:
            step: number of finished steps.
            interval: measurements since the last call.
            sync: ``StepExchange.figures``; empty if ranks take no local steps.
        """
        before = self._of_epoch
        self._of_epoch = interval if before is None else before.joined(interval)
        self._rounds = _describe_rounds(sync) if sync else ""
        text = _describe(interval) + self._rounds
        self._bar.update(self._bar_task, completed=step, description=text)

    def print_line(self, line: str) -> None:
        """Print a line above the progress bar."""
        self._console.print(line)

    def epoch_ended(self, epoch: int, scores: "Scores | None") -> None:
        """Print a line with the means over the epoch and the test result, unless None."""
        line = f"epoch {epoch:3d}/{self._num_epochs}"
        if self._of_epoch:  # None if the run resumed after the last step of an epoch
            line += f"  {_describe(self._of_epoch)}{self._rounds}"
        if scores is not None:
            line += f"  {self._metric} {scores.metric:.4f}"
        self._console.print(line, soft_wrap=True)
        self._of_epoch = None


def _describe(interval: "Interval") -> str:
    return (
        f"train loss {interval.loss:.4f}  {interval.samples_per_s:6.0f} samples/s  "
        f"communication {interval.communication_share:4.0%}"
    )


def _describe_rounds(sync: Mapping[str, Any]) -> str:
    if "staleness" in sync:
        return f"  staleness {sync['staleness']:.2f}, at most {sync['staleness_most']}"
    saved = format_bytes(max(sync["bytes_saved"], 0))
    return f"  round {sync['rounds']}  drift {sync['drift']:.3g}  saved {saved}"
