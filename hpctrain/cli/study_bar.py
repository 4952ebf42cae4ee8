"""Measurement of a study on a terminal."""

import signal
import sys
from typing import TYPE_CHECKING

from rich.progress import BarColumn, TextColumn

from hpctrain.core.units import format_seconds
from hpctrain.train.console import Bar, make_console

if TYPE_CHECKING:
    from hpctrain.studies.point_records import PointRecord
    from hpctrain.studies.points import PointRepeat
    from hpctrain.studies.study_run import Study


def measure(found: "Study", attempts: "list[PointRepeat]") -> bool:
    """Measure attempts with a progress bar; return False if the study stopped early."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        # An exception ends the ranks of the present point.
        signal.signal(number, lambda number, _frame: sys.exit(128 + number))
    with StudyBar(found, attempts) as bar:
        return found.measure(attempts, begun=bar.begun, ended=bar.ended)


class StudyBar(Bar):
    """Progress bar that shows the present point and prints a line for each attempt."""

    def __init__(self, found: "Study", attempts: "list[PointRepeat]") -> None:
        self._console = make_console(shown=True)
        texts = ("{task.completed}/{task.total}", "{task.description}")
        count, text = (TextColumn(each, markup=False) for each in texts)
        super().__init__(self._console, count, BarColumn(), text)
        self._study, self._num_attempts = found, len(attempts)
        self._left = {attempt.order: attempt for attempt in attempts}
        self._task = self._bar.add_task("", total=len(attempts))

    def begun(self, attempt: "PointRepeat") -> None:
        """Show the point of the attempt that starts."""
        left_s = self._study.expected_s(self._left.values())
        text = attempt.text + (f"  {format_seconds(left_s)} left" if left_s else "")
        done = self._num_attempts - len(self._left)
        self._bar.update(self._task, completed=done, description=text)

    def ended(self, record: "PointRecord") -> None:
        """Print the result of the attempt that has ended."""
        text = f"failed: {record.error}"
        if record.is_done:
            step = format_seconds(record.mean_step_s)
            text = f"{step} a step, {record.samples_per_s or 0:.0f} samples/s"
            if record.is_disturbed:
                text += (
                    f"; disturbed: other processes used {record.other_cores:.1f} of "
                    f"{record.machine_cores} cores"
                )
        del self._left[record.order]
        line = f"{record.text}  repeat {record.repeat}: {text}"
        self._console.print(line, soft_wrap=True)
