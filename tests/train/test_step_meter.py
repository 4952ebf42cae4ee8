import io
import os
from dataclasses import replace

import pytest
from rich.console import Console

from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.train.console import Progress, make_console
from hpctrain.train.evaluation import Scores
from hpctrain.train.step_meter import Interval, StepMeter


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_loss_is_the_mean_over_all_samples_of_all_ranks(world):
    tally = StepMeter()
    rows = [(rank, step, rank + step) for rank in range(world.size) for step in (1, 2)]
    for rank, step, num_samples in rows:
        if rank == world.rank:
            tally.add(
                loss=10.0 * rank + step, num_samples=num_samples, work_s=3.0, communication_s=1.0
            )
    interval = tally.take(MpiCommunicator(world))
    total = sum(num for _, _, num in rows)
    assert interval.num_samples == total
    assert interval.num_steps == 2
    assert interval.loss == pytest.approx(
        sum((10 * rank + step) * num for rank, step, num in rows) / total, rel=1e-14
    )
    assert (interval.compute_s, interval.communication_s) == pytest.approx((2.0, 1.0))
    assert interval.communication_share == pytest.approx(1 / 3)
    assert interval.samples_per_s == pytest.approx(total / 6.0)


@pytest.mark.ranks(1, 2, 3)
def test_times_are_recorded_per_rank_and_as_mean(world):
    tally = StepMeter()
    for step in (1, 2):
        tally.add(loss=1.0, num_samples=1, work_s=step * (world.rank + 2.0), communication_s=step)
    tally.add_checkpoint(world.rank + 1.0)
    interval = tally.take(MpiCommunicator(world))
    assert interval.of_ranks == {
        "compute_s": [1.5 * (rank + 1) for rank in range(world.size)],
        "communication_s": [1.5] * world.size,
        "input_s": [0.0] * world.size,
        "checkpoint_s": [0.5 * (rank + 1) for rank in range(world.size)],
    }
    assert interval.compute_s == pytest.approx(1.5 * (world.size + 1) / 2)


def test_each_interval_starts_without_samples(world):
    tally = StepMeter()
    for loss in (1.0, 2.0):
        tally.add(loss=loss, num_samples=1, work_s=1.0, communication_s=0.0)
        assert tally.take(MpiCommunicator(world)).loss == loss


@pytest.mark.ranks(1, 2, 3)
def test_restored_sums_of_all_ranks_are_in_the_next_record(world):
    comm, tally, later = MpiCommunicator(world), StepMeter(), StepMeter()
    tally.add(loss=world.rank, num_samples=2, work_s=3.0, communication_s=1.0)
    later.load_shared(tally.shared(comm), world.rank)
    later.add(loss=4.0, num_samples=2, work_s=3.0, communication_s=1.0)
    interval = later.take(comm)
    assert (interval.num_steps, interval.num_samples) == (2, 4 * world.size)
    assert interval.loss == pytest.approx((4.0 + (world.size - 1) / 2) / 2)
    assert (interval.compute_s, interval.communication_s) == pytest.approx((2.0, 1.0))


def test_the_wait_for_inputs_is_counted(world):
    tally = StepMeter()
    for batch in tally.inputs([1, 2, 3]):
        tally.add(loss=float(batch), num_samples=1, work_s=1.0, communication_s=0.0)
    interval = tally.take(MpiCommunicator(world))
    assert interval.loss == 2.0
    assert 0 < interval.input_s < 1


INTERVAL = Interval(
    num_steps=2, num_samples=100, loss=0.5, compute_s=0.75, communication_s=0.2, input_s=0.05
)
SCORES = Scores(loss=0.4, metric=0.9, num_samples=10)
LINE = "epoch 1/2 train loss 0.5000 50 samples/s communication 20%"
ROUNDS = {"rounds": 7, "drift": 0.01234, "bytes_saved": 3 << 20}


def shown(*intervals, scores=SCORES, terminal=False, quiet=False, sync=None):
    file = io.StringIO()
    console = Console(file=file, force_terminal=terminal, width=80, quiet=quiet)
    with Progress(console, num_steps=4, num_epochs=2, metric="test accuracy") as progress:
        for step, interval in enumerate(intervals, 2):
            progress.advance(step, interval, sync)
        progress.epoch_ended(1, scores)
    return " ".join(file.getvalue().split())


def test_without_a_terminal_there_is_one_line_per_epoch():
    assert shown(INTERVAL) == f"{LINE} test accuracy 0.9000"
    rounds = "round 7 drift 0.0123 saved 3.0 MiB"
    assert shown(INTERVAL, sync=ROUNDS) == f"{LINE} {rounds} test accuracy 0.9000"
    later = replace(INTERVAL, num_samples=300, loss=1.5)
    mean = LINE.replace("0.5000 50", "1.2500 100")
    assert shown(INTERVAL, later, scores=None) == mean


def test_a_terminal_has_a_progress_bar_on_rank_0_only(monkeypatch):
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
def test_only_a_terminal_with_a_width_counts_as_terminal(monkeypatch, tty, columns, terminal):
    """The pseudo-terminal that mpirun creates has no width."""
    monkeypatch.setattr("sys.stdout", FakeStdout(tty=tty))
    monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr(os, "get_terminal_size", lambda _: os.terminal_size((0, 0)))
    assert make_console(shown=True).is_terminal is terminal
