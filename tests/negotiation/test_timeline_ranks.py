"""Timelines of named operations on real ranks, also after the death of a rank."""

import json

import pytest
import torch

import hpctrain
from hpctrain.runtime.world import start_timeline, stop_timeline
from tests.runtime.victims import run_ranks


def rows(path):
    """Return the names of events by tensor."""
    events = json.loads(path.read_text())
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    found = {}
    for event in events:
        if event["ph"] not in "ME":
            found.setdefault(names[event["pid"]], []).append(event["name"])
    return found


@pytest.mark.ranks(1, 2, 3)
def test_every_rank_writes_a_timeline_of_its_operations(hvd, tmp_path):
    start_timeline(str(tmp_path / "t-{rank}.json"), mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="loss")
    hvd.allgather(torch.ones(2, 2), name="rows")
    hvd.grouped_allreduce([torch.ones(3), torch.ones(5)], name="two")
    stop_timeline()
    hvd.allreduce(torch.ones(3), name="late")
    found = rows(tmp_path / f"t-{hvd.rank()}.json")
    mine = found.pop(f"rank {hvd.rank()}")
    assert set(mine) == {"CYCLE_START"}
    assert set(found) == {"allreduce.loss", "allgather.rows", "allreduce.two"}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", str(hvd.rank())} <= set(found["allreduce.loss"])
    assert {"NEGOTIATE_ALLGATHER", "ALLGATHER"} <= set(found["allgather.rows"])
    phases = [name for name in found["allreduce.two"] if "MEMCPY" in name or "MPI_" in name]
    assert phases == ["MEMCPY_IN_FUSION_BUFFER", "MPI_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("variable", ["HPCTRAIN_TIMELINE", "HOROVOD_TIMELINE"])
def test_a_variable_starts_a_timeline_and_shutdown_completes_it(tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, str(tmp_path / "t-{rank}.json"))
    hpctrain.init(ranks_per_node=2)
    rank, size = hpctrain.rank(), hpctrain.size()
    hpctrain.allreduce(torch.ones(100_000), name="loss")
    hpctrain.shutdown()
    events = rows(tmp_path / f"t-{rank}.json")["allreduce.loss"]
    if size == 4:  # two nodes
        assert {"RAIL", "NODE"} <= set(events[events.index("MPI_ALLREDUCE") :])


def open_slices(path):
    """Return, for each tensor, the number of slices with a begin but no end."""
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
def test_a_killed_rank_leaves_its_operations_in_the_timeline(tmp_path, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_STATS", "1")
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
    outcome = run_ranks(tmp_path, body)
    assert outcome.code != 0
    # the table of statistics is not printed after a failure
    assert "communication of" not in outcome.err
    for rank in range(2):
        found = open_slices(tmp_path / f"{rank}.json")
        last = [name for name in found if "last" in name]
        assert last, f"rank {rank} lacks its last operation"
        assert [found[name] for name in last] == [0] * len(last)
        assert {f"allreduce.step.{step}" for step in range(50)} <= found.keys()
