"""Ranks of ``hpctrain train`` are killed from outside at random times of the run.

``TEST_KILLS=100`` sets the number of kills; the seed and the times of each run are
printed. ``TEST_SEED=17`` starts with the run of that seed.
"""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from itertools import count
from pathlib import Path

import pytest

from hpctrain.cluster.env import RANK_LOST
from hpctrain.core.records import read
from hpctrain.launch import mpiexec
from tests.harness import preload
from tests.harness.pace import scaled
from tests.processes import is_alive, wait_until
from tests.train import dying
from tests.train.starting import ROOT

KILLS = int(os.environ.get("TEST_KILLS", "2"))
SEED = int(os.environ.get("TEST_SEED", "0"))
LIMIT_S = 120
EVERY = 10  # steps between checkpoints

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.launches,
    pytest.mark.requires("recovery"),
    pytest.mark.limit(120 + 20 * KILLS),
]

CONFIG = """
name = "mortal"
[model]
target = "tests.train.mortal:model"
[data]
target = "tests.train.mortal:data"
args = { folder = "DATA" }
[optimizer]
name = "SGD"
lr = 0.05
args = { momentum = 0.9 }
[train]
epochs = 8
global_batch = 64
[checkpoint]
every = 10
[log]
every_steps = 1
plots = false
"""
REPRODUCIBLE = "\n[train]\nreproducible = true\nmicro_shards = 4\n"


class Run:
    """One run on three or four ranks in a folder, with kills.

    Args:
        folder: created for the run.
        num_ranks: number of ranks at the start.
        reproducible: set ``train.reproducible``.
        dies: rank, function and call at which the rank kills itself, as arguments of ``dying``.
    """

    def __init__(
        self, folder: Path, *, num_ranks: int, reproducible: bool, dies: tuple[str, ...] = ()
    ) -> None:
        self.folder, self.num_ranks, self.killed = folder, num_ranks, [*map(int, dies[:1])]
        self.dies = dies
        folder.mkdir()
        config = CONFIG.replace("DATA", str(folder.parent / "digits"))
        if reproducible:
            config = config.replace("\n[train]\n", REPRODUCIBLE)
        (folder / "mortal.toml").write_text(config)

    def carry_out(self, kills: list[tuple[int, float]]) -> "Run":
        """Run to the end; kill each rank, given its delay in seconds after the previous kill."""
        line = [*preload.python(), "-m", "hpctrain"]
        launch = [*line, "launch", "-n", str(self.num_ranks), "--recover"]
        program = [*preload.python(), dying.__file__, *self.dies] if self.dies else line
        train = [*program, "train", "mortal.toml", "--set", "output_dir=run"]
        paths = {"PYTHONPATH": str(ROOT), "NOTES": str(self.folder)}
        with (self.folder / "message").open("wb") as message:
            process = subprocess.Popen(
                [*launch, *train],
                env=mpiexec.environment() | paths,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=message,
                stderr=message,
            )
        with process:
            try:
                assert wait_until(lambda: self._has_begun() or self._is_over(process), LIMIT_S)
                begun = time.monotonic()
                for rank, delay_s in kills:
                    time.sleep(delay_s)
                    self._kill(rank)
                self.code = process.wait(scaled(LIMIT_S))
                self.seconds = time.monotonic() - begun
            finally:
                process.terminate()
        self.message = (self.folder / "message").read_text()
        return self

    @staticmethod
    def _is_over(process: subprocess.Popen[bytes]) -> bool:
        return process.poll() is not None

    def _has_begun(self) -> bool:
        files = [self.folder / f"pid-{rank}" for rank in range(self.num_ranks)]
        return all(file.exists() and file.read_text() for file in files)

    def _kill(self, rank: int) -> None:
        """Kill a rank unless it or the run has finished."""
        pid = int((self.folder / f"pid-{rank}").read_text())
        if is_alive(pid) and not self.is_finished():
            os.kill(pid, signal.SIGKILL)
            self.killed.append(rank)

    def records(self) -> list[dict]:
        file = self.folder / "run" / "metrics.jsonl"
        return read(file) if file.exists() else []

    def is_finished(self) -> bool:
        return any(record["event"] == "finished" for record in self.records())

    def ends(self) -> dict[int, str]:
        """Return the hash of the parameters of each rank that reached its end."""
        return {int(f.name[4:]): f.read_text() for f in self.folder.glob("end-*")}

    def parts(self) -> list[list[Counter]]:
        """Return the samples of each step, for each world that trained, the largest world first.

        The last step of a world is the one that some rank has not finished; it may lack samples.
        """
        worlds: dict[int, list[list[Counter]]] = {}
        for file in self.folder.glob("samples-*"):
            size, *lines = file.read_text().split("\n")[:-1] or ("0",)
            steps = [Counter()]
            for line in lines:
                if line:
                    steps[-1].update(line.split())
                else:
                    steps.append(Counter())
            worlds.setdefault(int(size), []).append(steps)
        worlds.pop(0, None)  # networks that were never trained
        return [merged(worlds[size]) for size in sorted(worlds, reverse=True)]


def merged(ranks: list[list[Counter]]) -> list[Counter]:
    """Return the steps that every rank has finished, and the samples after them."""
    finished = min(len(steps) for steps in ranks) - 1
    whole = [sum((steps[n] for steps in ranks), Counter()) for n in range(finished)]
    return [*whole, sum((step for steps in ranks for step in steps[finished:]), Counter())]


def drawn(seed: int, seconds: float) -> tuple[int, bool, list[tuple[int, float]]]:
    """Draw number of ranks, reproducibility and kills of a run."""
    rng = random.Random(seed)
    num_ranks = rng.choice((3, 4, 4))
    victims = rng.sample(range(num_ranks), rng.choice((1, 2, 2, num_ranks - 1)))
    delays = [rng.uniform(0, seconds)]
    # Later kills come at once, in the recovery from the first kill, or in the training after it.
    delays += [rng.choice((0.0, rng.uniform(0, 1), rng.uniform(0, seconds))) for _ in victims[1:]]
    return num_ranks, rng.random() < 0.5, list(zip(victims, delays, strict=True))


def check(run: Run, reference: list[Counter], hash_of_whole: str | None) -> tuple[int, int]:
    """Check the guarantees of the guide; return the numbers of repeated steps and samples."""
    assert run.code == 0, run.message
    ends = run.ends()
    assert sorted({*range(run.num_ranks)} - {*run.killed}) == sorted(ends), run.message
    assert len({*ends.values()}) == 1, "replicas must be identical"
    records = run.records()
    assert records[-1]["event"] == "finished"
    assert hash_of_whole in (None, records[-1]["state_hash"])
    steps = [record["step"] for record in records if record["event"] == "step"]
    assert steps == [*range(1, len(reference) + 1)]
    reached = again = num_samples = 0
    for part in run.parts():
        *whole, rest = part
        if not whole:  # a world that finished no step
            num_samples += rest.total()
            continue
        start = reference.index(whole[0])
        assert start % EVERY == 0
        assert start <= reached <= start + 2 * EVERY, (
            "a world must repeat at most two checkpoint intervals"
        )
        assert whole == reference[start : start + len(whole)], (
            "each step must have the samples of the reference"
        )
        following = reference[start + len(whole) : start + len(whole) + 2]
        assert rest <= sum(following, Counter())
        again += max(0, reached - start)
        num_samples += sum(step.total() for step in whole) + rest.total()
        reached = start + len(whole)
    assert reached == len(reference)
    return again, num_samples - sum(step.total() for step in reference)


def test_no_sample_is_lost_after_random_kills(tmp_path):
    """The run continues from its last checkpoint, and all ranks end with the same parameters.

    Each step after the checkpoint has the samples of an undisturbed run. In a reproducible run
    also the bits are the same.
    """
    whole = Run(tmp_path / "plain", num_ranks=4, reproducible=False).carry_out([])
    same = Run(tmp_path / "same", num_ranks=4, reproducible=True).carry_out([])
    (*reference, rest), hash_of_whole = whole.parts()[0], same.records()[-1]["state_hash"]
    assert not rest
    assert same.parts()[0][:-1] == reference
    num_kills = 0
    for seed in count(SEED):
        num_ranks, reproducible, kills = drawn(seed, min(whole.seconds, same.seconds))
        folder = tmp_path / f"seed-{seed}"
        run = Run(folder, num_ranks=num_ranks, reproducible=reproducible).carry_out(kills)
        again, more = check(run, reference, hash_of_whole if reproducible else None)
        num_kills += len(run.killed)
        moments = ", ".join(f"rank {rank} after {delay_s:.3f} s" for rank, delay_s in kills)
        sys.__stderr__.write(
            f"{num_kills} of {KILLS} kills: seed {seed}, {num_ranks} ranks, "
            f"{'reproducible, ' if reproducible else ''}{moments}: killed {run.killed}, "
            f"{again} steps and {more} samples taken again\n"
        )
        shutil.rmtree(folder)
        if num_kills >= KILLS:
            break


SURVIVED = {
    "last step": ("train/mortal.py:_note_step", lambda num_steps: num_steps),
    "final checkpoint": ("checkpoint/manager.py:save", lambda num_steps: num_steps // EVERY + 1),
}
"""Function in which a rank dies, and which of its calls."""
ENDS_ALL = {"init": "comm/factory.py:_together", "farewell": "comm/liveness.py:wait_for_end"}


@pytest.mark.limit(240)
@pytest.mark.parametrize("moment", SURVIVED)
def test_a_run_survives_a_death_at_the_end_of_training(tmp_path, moment):
    place, nth = SURVIVED[moment]
    whole = Run(tmp_path / "plain", num_ranks=3, reproducible=False).carry_out([])
    *reference, _ = whole.parts()[0]
    for rank in "0", "1":
        dies = (rank, place, str(nth(len(reference))))
        run = Run(tmp_path / rank, num_ranks=3, reproducible=False, dies=dies).carry_out([])
        check(run, reference, None)
        assert "INTERNAL ASSERT" not in run.message  # an assertion of torch at the exit of Python


@pytest.mark.limit(240)
@pytest.mark.parametrize("moment", ENDS_ALL)
@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_death_outside_of_training_ends_all_ranks_and_keeps_results(tmp_path, moment, rank):
    dies = (rank, ENDS_ALL[moment], "1")
    run = Run(tmp_path / "run", num_ranks=3, reproducible=False, dies=dies).carry_out([])
    assert run.code == RANK_LOST, run.message
    assert "died" in run.message
    assert ("test accuracy " in run.message) == run.is_finished() == (moment == "farewell"), (
        run.message
    )
