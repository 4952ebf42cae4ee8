"""What named operations of real ranks leave in their timelines."""

import json

import pytest
import torch

import hpctrain
from hpctrain.runtime.timeline_switch import start_timeline, stop_timeline


def rows(path):
    """Names of events by tensor."""
    events = json.loads(path.read_text())
    names = {e["pid"]: e["args"]["name"] for e in events if e.get("name") == "process_name"}
    found = {}
    for event in events:
        if event["ph"] not in "ME":
            found.setdefault(names[event["pid"]], []).append(event["name"])
    return found


@pytest.mark.ranks(1, 2, 3)
def test_every_rank_writes_a_timeline_of_what_it_does(hvd, tmp_path):
    start_timeline(str(tmp_path / "t-{rank}.json"), mark_cycles=True)
    hvd.allreduce(torch.ones(3), name="loss")
    hvd.allgather(torch.ones(2, 2), name="rows")
    stop_timeline()
    hvd.allreduce(torch.ones(3), name="late")
    found = rows(tmp_path / f"t-{hvd.rank()}.json")
    mine = found.pop(f"rank {hvd.rank()}")
    assert set(mine) == {"CYCLE_START"}
    assert set(found) == {"allreduce.loss", "allgather.rows"}
    assert {"NEGOTIATE_ALLREDUCE", "ALLREDUCE", str(hvd.rank())} <= set(found["allreduce.loss"])
    assert {"NEGOTIATE_ALLGATHER", "ALLGATHER"} <= set(found["allgather.rows"])


@pytest.mark.ranks(2)
def test_what_travels_together_shows_the_copies(hvd, tmp_path):
    path = tmp_path / "t-{rank}.json"
    start_timeline(str(path))
    hvd.grouped_allreduce([torch.ones(3), torch.ones(5)], name="two")
    stop_timeline()
    (events,) = rows(tmp_path / f"t-{hvd.rank()}.json").values()
    phases = [name for name in events if "MEMCPY" in name or name == "MPI_ALLREDUCE"]
    assert phases == ["MEMCPY_IN_FUSION_BUFFER", "MPI_ALLREDUCE", "MEMCPY_OUT_FUSION_BUFFER"]
    assert {"WAIT", "NODE", "RAIL"} & set(events[events.index("MPI_ALLREDUCE") :])


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("variable", ["HPCTRAIN_TIMELINE", "HOROVOD_TIMELINE"])
def test_a_variable_starts_a_timeline_that_the_end_completes(tmp_path, monkeypatch, variable):
    monkeypatch.setenv(variable, str(tmp_path / "t-{rank}.json"))
    hpctrain.init()
    rank = hpctrain.rank()
    hpctrain.allreduce(torch.ones(3), name="loss")
    hpctrain.shutdown()
    assert "allreduce.loss" in rows(tmp_path / f"t-{rank}.json")


@pytest.mark.ranks(4)
def test_two_levels_show_the_rail_and_the_node(tmp_path):
    hpctrain.init(ranks_per_node=2)
    rank = hpctrain.rank()
    start_timeline(str(tmp_path / "t-{rank}.json"))
    hpctrain.allreduce(torch.ones(100_000), name="loss")
    hpctrain.shutdown()
    events = rows(tmp_path / f"t-{rank}.json")["allreduce.loss"]
    assert {"RAIL", "NODE"} <= set(events[events.index("MPI_ALLREDUCE") :])
