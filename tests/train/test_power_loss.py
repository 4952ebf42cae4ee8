"""Records and files that a checkpoint depends on are on disk before the checkpoint."""

import pytest

from hpctrain import checkpoint
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.atomic import PART
from hpctrain.train.metrics import Metrics
from hpctrain.train.run_directory import RunDirectory
from tests.train.job import Job

OTHERS = ("checkpoints", "log", "metrics.jsonl", "plots")


@pytest.mark.ranks(1, 2)
@pytest.mark.usefixtures("world")
def test_files_that_a_checkpoint_depends_on_are_on_disk_before_it(disk, here, configure, shared):
    job = Job(here, configure, shared / "run", "checkpoint.every=4", "train.epochs=2")
    num_seen = []

    def watch(target):
        if not target.name.startswith("step-") or target.name.endswith(PART):
            return
        [room] = target.parent.glob(f"{target.name}.*{PART}")
        records = checkpoint.load(room, SerialCommunicator()).state["num_records"]
        metrics = job.directory.metrics
        # Collected in faults, because exceptions on the checkpoint thread do not fail the test.
        if not disk.has_name(metrics) or disk.kept(metrics).count(b"\n") < records:
            disk.faults.append(f"records when {target} got its name")
        disk.faults.extend(disk.lost(*OTHERS, below=job.directory.path))
        num_seen.append(records)

    disk.root = job.directory.path  # the test data are in the same folder as the run directory
    disk.watchers.append(watch)
    job.part(stop="SIGTERM", after=5)
    assert not disk.lost("log", "plots")
    job.part()
    assert not disk.lost("log", "plots")
    if here.comm.rank == 0:
        assert len(num_seen) >= 4
        assert num_seen == sorted(num_seen)


def test_a_run_directory_is_on_disk_before_its_first_step(disk):
    directory = RunDirectory(disk.root / "runs" / "a")
    directory.create("seed = 1\n", {"torch": "2"}, {"rails": 1})
    with Metrics(directory.metrics) as metrics:
        assert disk.has_name(directory.metrics)
        metrics.write("started")
        metrics.sync()
    assert not disk.lost()
    directory.resume("seed = 2\n", {"rails": 2}, num_records=1, step=0)
    assert not disk.lost()
