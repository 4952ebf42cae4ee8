"""What a run shows while it trains: a bar on a terminal, a line per epoch elsewhere."""

import io
import os
from dataclasses import replace

import pytest
from rich.console import Console

from hpctrain.train.console import Progress, make_console
from hpctrain.train.evaluate import Scores
from hpctrain.train.step_meter import Interval

INTERVAL = Interval(
    num_steps=2, num_samples=100, loss=0.5, compute_s=0.75, communication_s=0.2, input_s=0.05
)
SCORES = Scores(loss=0.4, metric=0.9, num_samples=10)
LINE = "epoch 1/2 train loss 0.5000 50 samples/s communication 20%"
ROUNDS = {"rounds": 7, "drift": 0.01234, "bytes_saved": 3 << 20}


def shown(*intervals, scores=SCORES, terminal=False, quiet=False, sync=None):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, quiet=quiet)
    with Progress(console, num_steps=4, num_epochs=2, metric="accuracy") as progress:
        for step, interval in enumerate(intervals, 2):
            progress.advance(step, interval, sync)
        progress.epoch_ended(1, scores)
    return " ".join(file.getvalue().split())


def test_elsewhere_than_on_a_terminal_there_is_one_line_per_epoch():
    assert shown(INTERVAL) == f"{LINE} test accuracy 0.9000"
    rounds = "round 7 drift 0.0123 saved 3.0 MiB"
    assert shown(INTERVAL, sync=ROUNDS) == f"{LINE} {rounds} test accuracy 0.9000"
    later = replace(INTERVAL, num_samples=300, loss=1.5)
    mean = LINE.replace("0.5000 50", "1.2500 100")
    assert shown(INTERVAL, later, scores=None) == mean


def test_on_a_terminal_there_is_a_bar_too_and_the_other_ranks_show_nothing(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = shown(INTERVAL, terminal=True)
    assert "step 2/4" in text
    assert "test accuracy" in text
    assert shown(INTERVAL, terminal=True, quiet=True) == ""


class FakeStdout(io.StringIO):
    def __init__(self, *, tty):
        super().__init__()
        self._tty = tty

    def isatty(self):
        return self._tty

    def fileno(self):
        return 1


@pytest.mark.parametrize(
    ("tty", "columns", "terminal"), [(True, "90", True), (False, "90", False), (True, "", False)]
)
def test_a_terminal_is_what_has_a_width(monkeypatch, tty, columns, terminal):
    """The pseudo-terminal of mpirun has none."""
    monkeypatch.setattr("sys.stdout", FakeStdout(tty=tty))
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
    assert make_console(shown=True).is_terminal is terminal
