"""Measurement of a study, with a progress bar."""

import os
import signal
import sys
from types import FrameType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, TextColumn

from hpctrain.core.units import format_seconds
from hpctrain.launch.program import handling
from hpctrain.train.console import Bar, make_console

if TYPE_CHECKING:
    from hpctrain.studies.point_records import PointRecord
    from hpctrain.studies.points import PointRepeat
    from hpctrain.studies.study_run import Study


SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def measure(found: "Study", attempts: "list[PointRepeat]") -> bool:
    """Measure attempts with a progress bar; return False if the study stopped early.

    SIGINT, SIGTERM and SIGHUP end the ranks of the current point, without a record of it, and then
    this process, with exit code 128 plus the signal number.
    """
    with StudyBar(found, attempts) as bar, handling(SIGNALS, bar.end):
        return found.measure(attempts, begun=bar.begun, ended=bar.ended)


class StudyBar(Bar):
    """Progress bar that shows the current point, and prints a line after each attempt."""

    def __init__(self, found: "Study", attempts: "list[PointRepeat]") -> None:
        self._console = make_console(shown=True)
        texts = ("{task.completed}/{task.total}", "{task.description}")
        count, text = (TextColumn(each, markup=False) for each in texts)
        super().__init__(self._console, count, BarColumn(), text)
        self._study, self._num_attempts = found, len(attempts)
        self._left = {attempt.order: attempt for attempt in attempts}
        self._present = "before its first point"
        self._task = self._bar.add_task("", total=len(attempts))

    def end(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal: print a line and raise ``SystemExit``; ignore further signals."""
        for each in SIGNALS:
            if signal.getsignal(each) == self.end:  # a second signal would interrupt the end
                signal.signal(each, signal.SIG_IGN)
        # Print now, because ending the ranks may take long. Do not use sys.stderr: the signal may
        # have interrupted a write to it.
        line = f"hpctrain: {signal.Signals(number).name} ends the study {self.state}\n"
        os.write(2, f"{chr(10) * os.isatty(2)}{line}".encode())
        sys.exit(128 + number)

    @property
    def state(self) -> str:
        """Text with the current point, the number of measured points, and how to continue."""
        count = f"{self._num_done} of {self._num_attempts} repeats of points"
        return f"{self._present}, after {count}; the same command measures the others"

    def begun(self, attempt: "PointRepeat") -> None:
        """Show the point of the attempt that starts."""
        self._present = f"in {attempt.text} repeat {attempt.repeat}"
        text = attempt.text + self._left_text()
        self._bar.update(self._task, completed=self._num_done, description=text)

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
        self._present = "between two points"
        line = f"{record.text}  repeat {record.repeat}: {text}"
        if not self._console.is_terminal:
            line += f"  [{self._num_done} of {self._num_attempts}{self._left_text()}]"
        self._console.print(line, soft_wrap=True)

    @property
    def _num_done(self) -> int:
        return self._num_attempts - len(self._left)

    def _left_text(self) -> str:
        left_s = self._study.expected_s(self._left.values())
        return f", {format_seconds(left_s)} left" if left_s else ""
