"""However a rank ends, its timeline holds all operations whose results it had."""

import json
import subprocess
import sys

import pytest

from tests.runtime.victims import run_ranks


def rows(path):
    """Names of tensors, and how many slices of each have begun and have not ended."""
    events = json.loads(path.read_text())
    names = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event["ph"] == "M" and event["name"] == "process_name"
    }
    counts = dict.fromkeys(names.values(), 0)
    for event in events:
        counts[names[event["pid"]]] += {"B": 1, "E": -1}.get(event["ph"], 0)
    return counts


@pytest.mark.launches
def test_what_a_rank_has_received_is_in_its_timeline_when_it_is_killed(tmp_path):
    body = """
    hvd.start_timeline(str(HERE / "{rank}.json"))
    for step in range(50):
        hvd.allreduce(torch.ones(10), name=f"step.{step}")
    tensors = [torch.ones(10) for _ in range(3)]
    hvd.grouped_allreduce(tensors, name="last")
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    hvd.allreduce(torch.ones(10), name="never")
    """
    run_ranks(tmp_path, body)
    for rank in range(2):
        found = rows(tmp_path / f"{rank}.json")
        last = [name for name in found if "last" in name]
        assert last, f"rank {rank} lacks its last operation"
        assert [found[name] for name in last] == [0] * len(last)
        assert {f"allreduce.step.{step}" for step in range(50)} <= found.keys()


ABORT = """
import sys
from pathlib import Path
from mpi4py import MPI
from hpctrain.runtime.abort import install
from hpctrain.negotiation.timeline import Timelines
timelines = Timelines(0, 1)
timelines.start(sys.argv[1])
hooks = install(MPI.COMM_WORLD, None)
hooks.last_words.append(timelines.stop)
timelines.current.negotiate_start("allreduce.late", "allreduce")
hooks.abort(86)
"""


def test_ranks_that_are_ended_for_another_write_what_they_waited_for(tmp_path):
    path = tmp_path / "t.json"
    done = subprocess.run(
        [sys.executable, "-c", ABORT, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 86, done.stderr
    assert rows(path)["allreduce.late"] == 1
