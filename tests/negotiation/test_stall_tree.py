"""Stall questions and answers of many ranks: messages and their sizes, and one report."""

import pytest

from hpctrain.comm.control_channel.mailbox import FAN_OUT
from hpctrain.core.config import Settings
from hpctrain.negotiation.stall import MAX_NAMES, Answers
from tests.harness.growth import MAX_SLOPE, slope
from tests.scale.engines import Engines, virtual_time
from tests.scale.network import Network

SETTINGS = Settings(stall_s=30.0, stall_abort_s=100.0)


def stalled_run(size, *, missing=5, deaf=(), seconds=20, name="loss"):
    """Return engines after the report of an operation that all ranks but one have submitted."""
    engines = Engines(size, Network(size, seed=size), SETTINGS)
    engines.network.lost = set(deaf)
    with virtual_time(engines):
        engines.submit(name, sorted(set(range(size)) - {missing}))
        engines.network.run()
        engines.messages.clear()
        engines.watch_stalls(28.0, 28.0 + seconds)
    return engines


def counts_of(engines):
    """Return the numbers of messages, of messages to the root, and of bytes to the root."""
    to_root = [num_bytes for _, dest, num_bytes in engines.messages if dest == 0]
    return len(engines.messages), len(to_root), sum(to_root)


SMALL, MANY = (8, 64), (64, 4096)


@pytest.mark.parametrize(
    "sizes", [SMALL, pytest.param(MANY, marks=[pytest.mark.conformance, pytest.mark.limit(600)])]
)
def test_all_ranks_that_ask_at_once_give_one_report_by_few_messages(sizes):
    counts = []
    for size in sizes:
        ranks = stalled_run(size)
        [(text, is_final)] = ranks.reports
        others = f"0-4,6-{size - 1}"
        assert f'"loss" has waited 30 s: submitted by ranks {others}, not by rank 5 on' in text
        assert not is_final
        assert len(text) < 2000
        num_messages, num_to_root, num_bytes = counts_of(ranks)
        assert num_messages <= 5 * size
        assert num_to_root <= 4 * 2 * FAN_OUT
        assert num_bytes <= 20_000 + size
        counts.append((size, num_messages))
    assert slope(counts) < MAX_SLOPE


def test_silent_ranks_do_not_hide_the_answers_of_other_ranks():
    # The ranks below rank 3 are 13 to 16 and 53 to 63; rank 40 is below ranks 9 and 2.
    ranks = stalled_run(64, missing=5, deaf=[3, 40])
    [(text, _)] = ranks.reports
    answering = "submitted by ranks 0-2,4,6-12,17-39,41-52"
    assert f"{answering}, not by ranks 3,5,13-16,40,53-63 on node0" in text
    assert "ranks 3,13-16,40,53-63 on node0: no answer" in text
    assert "rank 5 on node0: last collective" in text


def test_names_that_differ_between_ranks_cost_one_question_per_second():
    size, seconds = 128, 20
    ranks = Engines(size, Network(size, seed=1), SETTINGS)
    with virtual_time(ranks):
        for rank in range(size):
            ranks.submit(f"noname.{rank}", [rank])
        ranks.watch_stalls(30.0, 30.0 + seconds)
    assert 1 < len(ranks.reports) <= seconds
    assert all("does not answer" not in text for text, _ in ranks.reports)
    assert all(len(text) < 20_000 for text, _ in ranks.reports)
    num_messages, num_to_root, _ = counts_of(ranks)
    assert num_messages <= 5 * size * len(ranks.reports)
    assert num_to_root <= 4 * FAN_OUT * len(ranks.reports)


def test_questions_about_the_same_operation_are_asked_again_later():
    ranks = stalled_run(16, seconds=80)
    ages = [text.partition(" s: ")[0].rpartition(" ")[2] for text, _ in ranks.reports]
    assert ages == ["30", "60", "100"]
    assert [is_final for _, is_final in ranks.reports] == [False, False, True]


def test_merged_answers_keep_all_ranks_and_a_few_places():
    def answers(rank):
        own = 1 << rank
        return Answers((0, 1), own, {"a": own}, {"b": own}, {(str(rank), (), ""): (own, rank)})

    total = Answers((0, 1), 0, {}, {}, {})
    for rank in range(100):
        total.add(answers(rank))
    everyone = (1 << 100) - 1
    assert (total.ranks, total.waiting, total.lacking) == (
        everyone, {"a": everyone}, {"b": everyone},
    )  # fmt: skip
    shown = [ranks for ranks, _ in total.places.values()]
    assert sum(shown) | total.elsewhere == everyone
    assert sum(shown) & total.elsewhere == 0
    assert len(shown) < MAX_NAMES
