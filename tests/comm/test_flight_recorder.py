"""Check the flight recorder: its record of the last collectives of a process."""

import time

import pytest

from hpctrain.comm.flight_recorder import LATE_S, NUM_CALLS, FlightRecorder, is_collective

pytestmark = pytest.mark.ranks(1)


def test_each_communicator_counts_its_collectives_with_names_equal_on_all_ranks():
    mine, theirs = FlightRecorder(), FlightRecorder()
    names = []
    for recorder in (mine, theirs):
        pair, again = recorder.new_stream([0, 3]), recorder.new_stream([0, 3])
        for stream in (again, pair, again):
            stream.begin("barrier")
        names.append([name for name, _ in recorder.calls()])
    assert (
        names[0]
        == names[1]
        == [
            "collective 1 of ranks 0,3 (2): barrier",
            "collective 1 of ranks 0,3: barrier",
            "collective 2 of ranks 0,3 (2): barrier",
        ]
    )
    many = [mine.new_stream([*range(0, 10_000, 2), last]).name for last in (10_001, 10_003)]
    assert many[0] != many[1]
    assert all(len(name) < 100 for name in many)
    assert mine.new_stream([*range(0, 10_000, 2), 10_001]).name == f"{many[0]} (2)"
    assert all(map(is_collective, names[0]))
    assert not is_collective("allreduce.loss")


def test_flight_recorder_keeps_the_last_collectives():
    recorder = FlightRecorder()
    stream = recorder.new_stream([0, 1])
    assert recorder.last() == ("none so far", None)
    for number in range(NUM_CALLS + 10):
        stream.begin(f"sum of {number}")
    lines = recorder.report().splitlines()
    assert len(lines) == NUM_CALLS
    assert lines[0].endswith("collective 11 of ranks 0-1: sum of 10")
    name, ago_s = recorder.last()
    assert name.endswith(f"sum of {NUM_CALLS + 9}")
    assert 0 <= ago_s < 60


def test_participant_that_has_not_called_a_collective_lacks_it():
    ahead, behind, outside = FlightRecorder(), FlightRecorder(), FlightRecorder()
    streams = [recorder.new_stream([0, 1]) for recorder in (ahead, behind)]
    elsewhere = outside.new_stream([2, 3])
    elsewhere.begin("barrier")
    for stream in streams:
        stream.begin("barrier")
    streams[0].begin("sum of 3")
    name, _ = ahead.last()
    assert [recorder.lacks(name) for recorder in (ahead, behind, outside)] == [False, True, False]
    streams[1].begin("sum of 3")
    assert not behind.lacks(name)


def test_only_long_waits_are_reported():
    recorder = FlightRecorder()
    stream = recorder.new_stream([0, 1])
    stream.waits_since_s = time.perf_counter() - 2 * LATE_S  # before its first collective
    assert recorder.waiting() == {}
    stream.begin("barrier")
    (name, since), *more = recorder.waiting().items()
    assert not more
    assert name == "collective 1 of ranks 0-1: barrier"
    assert 2 * LATE_S <= time.monotonic() - since < 2 * LATE_S + 60
    stream.waits_since_s = time.perf_counter()
    assert recorder.waiting() == {}
    stream.waits_since_s = None
    assert recorder.waiting() == {}
