"""Slow ranks are reported with the number of slow records and their hosts."""

import pytest

from hpctrain.train.slow_ranks import RECENT, SlowRanks, verdict


def times(*work_s, input_s=0.0):
    return {
        "compute_s": [*work_s],
        "input_s": [input_s * (rank == 1) for rank in range(len(work_s))],
    }


def output(*records, hosts=()):
    found = SlowRanks(dict(enumerate(hosts)))
    return [found.see(record) for record in records], found


EVEN, LATE = times(0.1, 0.1, 0.1), times(0.1, 0.1, 0.2)


def test_a_persistently_slow_rank_is_reported_once_with_its_host_and_once_when_it_recovers():
    lines, found = output(*[LATE] * 7, *[EVEN] * RECENT, *[LATE] * 5, hosts=("a", "a", "b"))
    assert [bool(some) for some in lines] == [False] * 4 + [True] + [False] * 11 + [True] + [
        False
    ] * 4 + [True]
    (first,), (second,) = lines[4], lines[16]
    assert "rank 2 on b is slow in 5 of the last 5 records" in first
    assert "computes 0.2 s" in first
    assert second == "rank 2 on b is as fast as the others again"
    assert found.counts(3) == [0, 0, 5]


def test_an_occasionally_slow_rank_is_temporary_and_not_reported():
    lines, found = output(LATE, EVEN, EVEN, LATE, EVEN)
    assert lines == [[]] * 5
    assert found.counts(3) == [0, 0, 2]
    assert [verdict(count) for count in (0, 1, 4, 5, 10)] == [
        "",
        *["temporary"] * 2,
        *["persistent"] * 2,
    ]


@pytest.mark.parametrize(
    "record",
    [times(0.1, 0.1, 0.11), times(0.001, 0.001, 0.005), times(0.1), times(0.2, 0.2)],
    ids=["a tenth longer", "milliseconds", "alone", "both"],
)
def test_a_little_more_work_is_not_slow(record):
    _, found = output(*[record] * RECENT)
    assert found.counts(3) == [0, 0, 0]


def test_waiting_for_input_counts_as_slow_and_waiting_for_ranks_does_not():
    waiting = {**times(0.1, 0.1, 0.1, input_s=0.05), "communication_s": [0.3, 0.0, 0.3]}
    _, found = output(waiting)
    assert found.counts(3) == [0, 1, 0]
