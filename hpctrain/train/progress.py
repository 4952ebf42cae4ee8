"""Progress of a training run: a bar on a terminal, a line per epoch elsewhere."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from hpctrain.core.units import format_bytes
from hpctrain.train.console import Bar
from hpctrain.train.evaluate import Scores
from hpctrain.train.step_meter import Interval, joined


class Progress(Bar):
    """Shows the steps of a run on rank 0's console."""

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
        self._of_epoch: list[Interval] = []
        self._rounds = ""
        self._bar_task = self._bar.add_task("", total=num_steps)

    def advance(
        self, step: int, interval: Interval, sync: Mapping[str, Any] | None = None
    ) -> None:
        """Show what the last steps were like, and how far replicas were apart if they may be."""
        self._of_epoch.append(interval)
        self._rounds = _describe_rounds(sync) if sync else ""
        text = _describe(interval) + self._rounds
        self._bar.update(self._bar_task, completed=step, description=text)

    def tell(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line)

    def epoch_ended(self, epoch: int, scores: Scores | None) -> None:
        """Print a line that stays: the means over the epoch, and the test if there was one."""
        line = f"epoch {epoch:3d}/{self._num_epochs}"
        if self._of_epoch:  # none where a run goes on after the last step of an epoch
            line += f"  {_describe(joined(self._of_epoch))}{self._rounds}"
        if scores is not None:
            line += f"  test {self._metric} {scores.metric:.4f}"
        self._console.print(line, soft_wrap=True)
        self._of_epoch.clear()


def _describe(interval: Interval) -> str:
    return (
        f"train loss {interval.loss:.4f}  {interval.samples_per_s:6.0f} samples/s  "
        f"communication {interval.communication_share:4.0%}"
    )


def _describe_rounds(sync: Mapping[str, Any]) -> str:
    saved = format_bytes(max(sync["bytes_saved"], 0))
    return f"  round {sync['rounds']}  drift {sync['drift']:.3g}  saved {saved}"
