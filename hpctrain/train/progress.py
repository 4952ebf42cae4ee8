"""What a person sees while a run trains: a bar on a terminal, a line per epoch elsewhere."""

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeRemainingColumn

from hpctrain.train.console import Bar
from hpctrain.train.evaluate import Scores
from hpctrain.train.tally import Interval, joined


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
        self._bar_task = self._bar.add_task("", total=num_steps)

    def advance(self, step: int, interval: Interval) -> None:
        """Show what the last steps were like."""
        self._of_epoch.append(interval)
        self._bar.update(self._bar_task, completed=step, description=_describe(interval))

    def epoch_ended(self, epoch: int, scores: Scores | None) -> None:
        """Print a line that stays: the means over the epoch, and the test if there was one."""
        line = f"epoch {epoch:3d}/{self._num_epochs}"
        if self._of_epoch:  # none where a run goes on after the last step of an epoch
            line += f"  {_describe(joined(self._of_epoch))}"
        if scores is not None:
            line += f"  test {self._metric} {scores.metric:.4f}"
        self._console.print(line)
        self._of_epoch.clear()


def _describe(interval: Interval) -> str:
    return (
        f"train loss {interval.loss:.4f}  {interval.samples_per_s:6.0f} samples/s  "
        f"communication {interval.communication_share:4.0%}"
    )
