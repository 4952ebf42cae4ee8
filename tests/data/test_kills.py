"""Check that kills and losses of power leave the old or the new data set, complete.

By default a few writers are killed, and in ``make conformance`` also one of two ranks.
``TEST_KILLS=200`` kills 200 writers and 10 ranks.
"""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch

from hpctrain.core.atomic import PART
from hpctrain.data.format.dataset_manifest import LOCK, MANIFEST, Field
from hpctrain.data.samples import Ragged
from hpctrain.data.tools.repair import repair
from hpctrain.data.writer import ShardWriter, write_arrays
from tests.data.mixed_set import shard, write_mixed
from tests.data.rewrite import NUM_SAMPLES, generation_in, samples

KILLS = int(os.environ.get("TEST_KILLS", "6"))
NUM_RESUMES = max(1, KILLS // 20)

pytestmark = pytest.mark.limit(60 + 2 * KILLS)


class Server:
    """Start writers from a process that has already imported everything."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.data.rewrite", "serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def killed(self, kind, generation, folder, delay_s):
        """Start a writer, kill it after a delay; return the generations that it had completed."""
        self._say(f"{kind} {generation} {folder}")
        time.sleep(delay_s)
        self._say("kill")
        return [int(line) for line in iter(self._process.stdout.readline, "\n")]

    def close(self):
        self._process.stdin.close()
        assert self._process.wait() == 0

    def _say(self, line):
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()


def samples_as_arrays(generation):
    rows = samples(generation, 0, NUM_SAMPLES)
    return {**rows, "text": Ragged.of([torch.from_numpy(text) for text in rows["text"]])}


@pytest.fixture(scope="module")
def server():
    made = Server()
    yield made
    made.close()


def test_a_writer_killed_at_any_instant_leaves_a_whole_data_set(folder, server):
    random_ = random.Random(0)
    write_arrays(folder, samples_as_arrays(1), samples_per_shard=20)
    finished = 1
    for _ in range(KILLS):
        printed = server.killed("rewrite", finished + 1, folder, random_.uniform(0, 0.25))
        found = generation_in(folder)
        # If it was killed between the manifest and its message, one more exists.
        assert found in {(printed or [finished])[-1] + more for more in (0, 1)}
        finished = found
    write_arrays(folder, {"x": np.arange(3)}, samples_per_shard=3)
    assert len(list(folder.iterdir())) == 2


def test_a_writer_that_is_killed_repeatedly_resumes_and_finishes(folder, server):
    random_ = random.Random(1)
    write_arrays(folder, samples_as_arrays(1), samples_per_shard=20)
    for generation in range(2, 2 + NUM_RESUMES):
        for attempt in range(100):
            delay_s = random_.uniform(0, 0.1 + attempt / 100)
            printed = server.killed("resume", generation, folder, delay_s)
            found = generation_in(folder)
            if found == generation:
                break
            assert found == generation - 1
            assert not printed
        else:
            pytest.fail("the writer did not get on")
    write_arrays(folder, {"x": np.arange(3)}, samples_per_shard=3)
    assert len(list(folder.iterdir())) == 2


@pytest.mark.launches
@pytest.mark.conformance
@pytest.mark.parametrize("attempt", range(NUM_RESUMES))
def test_a_killed_rank_leaves_a_whole_data_set(tmp_path, attempt):
    folder = tmp_path / "set"
    random_ = random.Random(attempt)
    command = [sys.executable, "-m", "hpctrain", "launch", "-n", "2", "--", sys.executable]
    words = ["-m", "tests.data.rewrite", "ranks", str(folder)]
    with subprocess.Popen(
        [*command, *words], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as job:
        pids = {}
        while len(pids) < 2:
            rank, pid, _ = map(int, job.stdout.readline().split())
            pids[rank] = pid
        time.sleep(random_.uniform(0, 0.5))
        os.kill(pids[random_.randrange(2)], signal.SIGKILL)
        printed = [int(line.split()[-1]) for line in job.stdout.read().splitlines()]
    found = generation_in(folder)
    assert found >= max(printed, default=1)
    write_arrays(folder, {"x": np.arange(3)}, samples_per_shard=3)
    assert len(list(folder.iterdir())) == 2


FIELDS = {"x": ((), "i8"), "words": Field.of((), "i8", ragged=True)}


def write(folder, comm, key):
    """Write full shards, and one partial shard on each rank."""
    with ShardWriter(folder, FIELDS, samples_per_shard=3, comm=comm, resume_key=key) as writer:
        for _ in range(2):
            writer.append({"x": [comm.rank] * 4, "words": [[1], [], [2, 3], [4]]})


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("key", [None, "key"])
def test_a_data_set_is_on_disk_when_its_manifest_is_there(disk, comm, folder, key):
    def watch(target):
        if target.name == MANIFEST:
            disk.faults.extend(disk.lost(MANIFEST, LOCK, below=folder))
        if target.name.endswith(".journal"):
            output = json.loads(target.with_name(target.name + PART).read_text())
            for name in (record["file"] for record in output["shards"]):
                if disk.kept(folder / name) != (folder / name).read_bytes():
                    disk.faults.append(f"{target} names {name}")

    disk.watchers.append(watch)
    for _ in range(2):  # a new set, then its replacement
        write(folder, comm, key)
        comm.barrier()  # rank 0 removes its lock when the others have ended their block
        assert not disk.lost()
        comm.barrier()
    assert not list(folder.glob("*.journal"))


def test_a_repaired_shard_is_on_disk(tmp_path, disk):
    write_mixed(tmp_path / "set")
    shutil.copytree(tmp_path / "set", tmp_path / "copy")
    shard(tmp_path / "set", 0)[0].unlink()
    assert repair(tmp_path / "set", tmp_path / "copy").report.is_whole
    assert not disk.lost("copy")
