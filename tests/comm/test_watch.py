"""Who waits long says for whom, once; who waits too long says so and stops."""

import logging

import pytest

from hpctrain.comm.waiting import LATE_S, Watch
from hpctrain.core.errors import RankLostError

HOSTS = {0: "n0", 1: "n1", 2: "n2"}


def test_a_late_rank_is_named_once_with_its_node_and_the_rail(caplog):
    watch = Watch(hosts=HOSTS, rank=0)
    with caplog.at_level(logging.WARNING):
        for waited_s in (0.1, LATE_S + 0.1, LATE_S + 0.2):
            watch.look(waited_s, 1, "rail 0")
        watch.look(LATE_S + 0.1, 1, "rail 0")
    (record,) = caplog.records
    assert record.getMessage().startswith(
        "rank 0 on n0 has waited 3 s for rank 1 on n1 over rail 0; it is busy"
    )


def test_inside_a_node_a_late_rank_is_nothing_to_speak_of(caplog):
    with caplog.at_level(logging.WARNING):
        Watch(hosts=HOSTS).look(100.0)
    assert not caplog.records


def test_a_wait_that_lasts_too_long_is_an_error_that_names_the_other_end():
    watch = Watch(hosts=HOSTS, rank=2, timeout_s=7)
    watch.look(6.9, 1, "rail 1")
    with pytest.raises(RankLostError, match=r"rank 2 on n2 .* 8 s for rank 1 on n1 over rail 1"):
        watch.look(8.0, 1, "rail 1")
    with pytest.raises(RankLostError, match=r"other ranks, longer than HPCTRAIN_TIMEOUT=7"):
        watch.look(8.0)


def test_a_lost_rank_is_found_first():
    def lost(ranks):
        raise RankLostError(f"one of {ranks} died")

    with pytest.raises(RankLostError, match=r"one of \(3,\) died"):
        Watch(lost, timeout_s=1).look(5.0, 3)
    with pytest.raises(RankLostError, match=r"one of \[2, 3\] died"):
        Watch(lost, timeout_s=1).of_group([2, 3]).look(5.0)
