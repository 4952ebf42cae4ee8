import io
from dataclasses import replace

import pytest
from rich.console import Console

from hpctrain.train.console import make_console
from hpctrain.train.evaluate import Scores
from hpctrain.train.progress import Progress
from hpctrain.train.step_meter import Interval

INTERVAL = Interval(
    num_steps=2, num_samples=100, loss=0.5, compute_s=0.75, communication_s=0.2, input_s=0.05
)


def shown(*, terminal, quiet=False):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=120, quiet=quiet)
    with Progress(console, num_steps=4, num_epochs=2, metric="accuracy") as progress:
        progress.advance(2, INTERVAL)
        progress.epoch_ended(1, Scores(loss=0.4, metric=0.9, num_samples=10))
    return file.getvalue()


def test_elsewhere_than_on_a_terminal_there_is_one_line_per_epoch():
    assert " ".join(shown(terminal=False).split()) == (
        "epoch 1/2 train loss 0.5000 50 samples/s communication 20% test accuracy 0.9000"
    )


def test_a_run_by_rounds_tells_how_far_its_replicas_are_apart():
    file = io.StringIO()
    console = Console(file=file, width=80)
    with Progress(console, num_steps=4, num_epochs=2, metric="accuracy") as progress:
        progress.advance(2, INTERVAL, {"rounds": 7, "drift": 0.01234, "bytes_saved": 3 << 20})
        progress.epoch_ended(1, Scores(loss=0.4, metric=0.9, num_samples=10))
    (line,) = file.getvalue().splitlines()
    assert line.endswith(
        "communication  20%  round 7  drift 0.0123  saved 3.0 MiB  test accuracy 0.9000"
    )


def test_on_a_terminal_there_is_a_bar_too(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = shown(terminal=True)
    assert "step 2/4" in text
    assert "test accuracy" in text


def test_the_other_ranks_show_nothing():
    assert shown(terminal=True, quiet=True) == ""


@pytest.mark.parametrize(
    ("tty", "columns", "terminal"), [(True, "90", True), (False, "90", False)]
)
def test_a_terminal_is_what_has_a_width(monkeypatch, tty, columns, terminal):
    monkeypatch.setattr("sys.stdout", FakeStdout(tty=tty))
    monkeypatch.setenv("COLUMNS", columns)
    assert make_console(shown=True).is_terminal is terminal


def test_the_pseudo_terminal_of_mpirun_is_none(monkeypatch):
    monkeypatch.setattr("sys.stdout", FakeStdout(tty=True))
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.setattr("os.get_terminal_size", lambda _: __import__("os").terminal_size((0, 0)))
    assert not make_console(shown=True).is_terminal


class FakeStdout(io.StringIO):
    def __init__(self, *, tty):
        super().__init__()
        self._tty = tty

    def isatty(self):
        return self._tty

    def fileno(self):
        return 1


def test_the_line_of_an_epoch_is_its_mean_even_without_a_test():
    file = io.StringIO()
    with Progress(
        Console(file=file, width=120), num_steps=4, num_epochs=1, metric="x"
    ) as progress:
        progress.advance(1, INTERVAL)
        progress.advance(3, replace(INTERVAL, num_samples=300, loss=1.5))
        progress.epoch_ended(1, None)
    text = " ".join(file.getvalue().split())
    assert text == "epoch 1/1 train loss 1.2500 100 samples/s communication 20%"
