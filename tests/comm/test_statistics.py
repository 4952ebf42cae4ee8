"""Check the table that ``HPCTRAIN_STATS=1`` prints: once, and only at a regular shutdown."""

import re

import pytest
import torch

import hpctrain
from hpctrain.comm.observed import Count, ObservedCall, Statistics, describe, observed
from hpctrain.comm.operation_result import Traffic
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.units import MIB
from hpctrain.runtime.world import current

SIZES = pytest.mark.ranks(1, 2, 3, 4)


def lines_of(text):
    """Return the lines of the table by operation, split into cells."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if ", means per rank" in line)
    return {line.split()[0]: line.split("  ") for line in lines[start + 1 :] if line.strip()}


def test_calls_of_one_operation_are_added():
    statistics = Statistics(SerialCommunicator())
    for seconds in (0.25, 0.5):
        moved = Traffic(node_bytes=8, rail_bytes=2, waited_s=0.125)
        statistics(ObservedCall(0, "allreduce_", 4, seconds, moved))
    statistics(ObservedCall(0, "barrier", None, 1.0, Traffic()))
    expected = Count(
        calls=2, num_bytes=8, node_bytes=16, rail_bytes=4, seconds=0.75, waited_s=0.25
    )
    assert statistics.counts["allreduce_"] == expected
    assert statistics.counts["barrier"] == Count(calls=1, seconds=1.0)


def test_the_table_has_means_and_spreads_over_ranks():
    count = {"calls": 3, "num_bytes": 10 * MIB, "node_bytes": 30 * MIB, "rail_bytes": MIB}
    ranks = [
        {"allreduce_": Count(**count, seconds=s, waited_s=s / 4)} for s in (0.010, 0.020, 0.060)
    ]
    cells = " ".join(lines_of(describe(ranks))["allreduce_"]).split()
    assert cells == [
        *("allreduce_", "3", "10.0", "MiB", "30.0", "MiB", "1.0", "MiB"),
        *("10.00", "ms", "30.00", "ms", "60.00", "ms", "2.50", "ms", "7.50", "ms", "15.00", "ms"),
        *("333.3", "MiB/s"),
    ]


def test_table_is_sorted_by_time_and_counts_absent_ranks_as_zero():
    ranks = [{"send": Count(calls=1, seconds=0.1), "barrier": Count(calls=1, seconds=0.3)}, {}]
    lines = lines_of(describe(ranks))
    assert list(lines) == ["operation", "barrier", "send"]
    assert lines["send"][1:][0].strip() in ("", "0.5")
    assert "0.0 us" in "  ".join(lines["send"])


def test_communicator_without_listeners_is_not_wrapped():
    comm = SerialCommunicator()
    assert observed(comm, None, None) is comm


def test_group_has_the_same_listeners():
    heard = []

    def listener(call):
        heard.append((call.operation, call.num_bytes))

    comm = observed(SerialCommunicator(), listener)
    comm.group([0]).allreduce_(torch.ones(3))
    comm.alltoall([torch.ones(2)])
    comm.broadcast_object("text")
    assert heard == [("allreduce_", 12), ("alltoall", 8), ("broadcast_object", None)]


@SIZES
def test_the_table_is_printed_once_by_rank_0_at_shutdown(monkeypatch, capfd):
    monkeypatch.setenv("HPCTRAIN_STATS", "1")
    hpctrain.init()
    rank, size = hpctrain.rank(), hpctrain.size()
    for _ in range(3):
        hpctrain.allreduce(torch.ones(1 << 18))
    hpctrain.barrier()
    assert current().attachments.statistics is not None
    hpctrain.shutdown()
    errors = capfd.readouterr().err
    if rank:
        assert "communication of" not in errors
        return
    assert f"communication of {size} rank{'s' * (size > 1)}, means per rank" in errors
    lines = lines_of(errors)
    assert " ".join(lines["allreduce_"]).split()[1:4] == ["3", "3.0", "MiB"]
    assert " ".join(lines["barrier"]).split()[1] == "1"


@SIZES
def test_rank_0_decides_for_all(monkeypatch, world, capfd):
    if world.rank == 0:
        monkeypatch.setenv("HPCTRAIN_STATS", "1")
    hpctrain.init()
    hpctrain.barrier()
    hpctrain.shutdown()
    assert ("communication of" in capfd.readouterr().err) == (world.rank == 0)


LINE = re.compile(r"r\d+ \| allreduce_ {7}\| {2}400\.0 KiB \| +[\d.]+ (us|ms|s)\n")


@pytest.mark.ranks(1, 2, 3)
def test_each_collective_prints_rank_operation_size_and_time(monkeypatch, capfd):
    monkeypatch.setenv("HPCTRAIN_TRACE", "1")
    hpctrain.init()
    total = hpctrain.allreduce(torch.ones(102_400), op=hpctrain.Sum)
    hpctrain.barrier()
    rank, size = hpctrain.rank(), hpctrain.size()
    hpctrain.shutdown()
    lines = capfd.readouterr().err.splitlines(keepends=True)
    assert bool((total == size).all())
    assert any(LINE.fullmatch(line) and line.startswith(f"r{rank} ") for line in lines), lines
    assert any(line.startswith(f"r{rank} | barrier ") for line in lines), lines
