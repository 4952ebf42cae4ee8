"""Timelines are complete JSON at any time, with Horovod's names and matching begin and end."""

import json
import threading
import time

import pytest

from hpctrain.comm.operation_result import Traffic
from hpctrain.negotiation.timeline import Timeline, Timelines
from tests.full_disk import largest_file

MOVED = Traffic(node_bytes=100, rail_bytes=50, waited_s=0.001, rail_s=0.002)


def record(timeline, name="allreduce.a", moved=MOVED):
    """Record the events of one operation, in the order of the controller and the executor."""
    timeline.cycle()
    timeline.begin(name, "NEGOTIATE_ALLREDUCE")
    timeline.rank_ready(name, 1)
    timeline.rank_ready(name, 0)
    timeline.end(name)
    timeline.begin(name, "ALLREDUCE", 4096)
    timeline.begin(name, "MEMCPY_IN_FUSION_BUFFER")
    timeline.end(name)
    timeline.begin(name, "MPI_ALLREDUCE")
    time.sleep(0.005)
    timeline.end(name, moved)
    timeline.end(name)


def row_of(events, name):
    """Return the events of one tensor without metadata events."""
    (number,) = {
        event["pid"]
        for event in events
        if event["name" if event["ph"] == "M" else "ph"] == "process_name"
        and event["args"].get("name") == name
    }
    return [event for event in events if event["pid"] == number and event["ph"] != "M"]


@pytest.mark.parametrize("mark", [False, True])
def test_an_operation_has_horovods_phases_in_order_and_optional_cycle_marks(tmp_path, mark):
    timeline = Timeline(tmp_path / "t.json", 0, 2, mark_cycles=mark)
    record(timeline)
    timeline.close()
    assert ("CYCLE_START" in (tmp_path / "t.json").read_text()) is mark
    events = json.loads((tmp_path / "t.json").read_text())
    row = [(event["ph"], event.get("name")) for event in row_of(events, "allreduce.a")]
    assert [each for each in row if each[0] != "E"] == [
        ("B", "NEGOTIATE_ALLREDUCE"),
        ("X", "1"),
        ("X", "0"),
        ("B", "ALLREDUCE"),
        ("B", "MEMCPY_IN_FUSION_BUFFER"),
        ("B", "MPI_ALLREDUCE"),
        ("X", "WAIT"),
        ("X", "RAIL"),
        ("X", "NODE"),
    ]
    assert [place for place, each in enumerate(row) if each[0] == "E"] == [3, 6, 11, 12]


@pytest.mark.parametrize(
    ("moved", "durations"),
    [
        (MOVED, {"WAIT": 1000, "RAIL": 2000, "NODE": None}),
        (Traffic(rail_bytes=50, waited_s=0.001), {"WAIT": 1000, "RAIL": None}),
        (Traffic(node_bytes=50), {"NODE": None}),
        (Traffic(waited_s=0.001), {"WAIT": 1000}),
        (Traffic(waited_s=1000.0), {"WAIT": None}),
        (Traffic(), {}),
        (None, {}),
    ],
)
def test_a_phase_has_a_slice_for_each_kind_of_traffic(tmp_path, moved, durations):
    timeline = Timeline(tmp_path / "t.json", 0, 2)
    record(timeline, moved=moved)
    timeline.close()
    row = row_of(json.loads((tmp_path / "t.json").read_text()), "allreduce.a")
    parts = {each["name"]: each["dur"] for each in row if each["ph"] == "X" and "cat" not in each}
    assert list(parts) == list(durations)
    for name, us in durations.items():
        assert us is None or parts[name] == pytest.approx(us, abs=1)
    began = next(each["ts"] for each in row if each.get("name") == "MPI_ALLREDUCE")
    ended = [each for each in row if each["ph"] == "E"][2]
    if None in durations.values():
        assert sum(parts.values()) == pytest.approx(ended["ts"] - began, abs=0.01)
    assert ended.get("args") == (moved._asdict() if moved is not None and any(moved) else None)


def test_the_file_is_complete_json_after_each_flush(tmp_path):
    path = tmp_path / "t.json"
    timeline = Timeline(path, 3, 4)
    head = json.loads(path.read_text())[0]
    assert head["args"]["rank"] == 3
    began_us = head["args"]["start_time_since_epoch_in_micros"]
    assert began_us == pytest.approx(time.time() * 1e6, abs=60e6)
    for name in ("allreduce.first", 'allreduce."\\\n\u00e4'):  # a name may have any characters
        record(timeline, name)
        timeline.flush()
        assert row_of(json.loads(path.read_text()), name)
    timeline.close()


def test_an_end_without_a_begin_is_omitted(tmp_path):
    timeline = Timeline(tmp_path / "t.json", 0, 1)
    timeline.end("allreduce.a")
    timeline.end("allreduce.a")
    record(timeline)
    timeline.close()
    row = row_of(json.loads((tmp_path / "t.json").read_text()), "allreduce.a")
    assert row[0]["name"] == "NEGOTIATE_ALLREDUCE"
    assert sum(each["ph"] == "B" for each in row) == sum(each["ph"] == "E" for each in row)


def test_threads_may_record_concurrently(tmp_path):
    timeline = Timeline(tmp_path / "t.json", 0, 1)

    def work(number):
        for _ in range(500):
            timeline.begin(f"allreduce.{number}", "ALLREDUCE")
            timeline.end(f"allreduce.{number}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    timeline.close()
    timeline.begin("allreduce.late", "ALLREDUCE")
    events = json.loads((tmp_path / "t.json").read_text())
    assert [len(row_of(events, f"allreduce.{number}")) for number in range(4)] == [1000] * 4
    assert "late" not in (tmp_path / "t.json").read_text()


def test_a_full_disk_ends_the_timeline_with_a_warning(tmp_path, caplog):
    timeline = Timeline(tmp_path / "t.json", 0, 1)
    with largest_file((tmp_path / "t.json").stat().st_size + 50):
        record(timeline)
        timeline.close()
    record(timeline)
    assert "File too large" in caplog.text
    assert json.loads((tmp_path / "t.json").read_text())


def test_only_rank_0_records_unless_the_path_contains_the_rank(tmp_path):
    every = [Timelines(rank, 2) for rank in range(2)]
    for timelines in every:
        timelines.start(str(tmp_path / "one.json"))
    assert [each.current is not None for each in every] == [True, False]
    first = every[0].current
    record(first)
    every[0].start(tmp_path / "one.json")
    assert every[0].current is first
    for timelines in every:  # a new file ends the first timeline
        timelines.start(tmp_path / "rank-{rank}.json", mark_cycles=True)
        timelines.stop()
        timelines.stop()
        assert timelines.current is None
    assert row_of(json.loads((tmp_path / "one.json").read_text()), "allreduce.a")
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "one.json",
        "rank-0.json",
        "rank-1.json",
    ]


def test_a_file_that_cannot_be_created_is_a_warning(tmp_path, caplog):
    timelines = Timelines(0, 1)
    timelines.start(tmp_path / "missing" / "t.json")
    assert timelines.current is None
    assert "the timeline file must be writable" in caplog.text
    assert str(tmp_path) in caplog.text
