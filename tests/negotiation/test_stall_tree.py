"""Stall questions and answers of many ranks: messages and their sizes, and one report."""

from random import Random

import pytest

from hpctrain.comm.control_channel.mailbox import FAN_OUT, tree_of
from hpctrain.core.config import Settings
from hpctrain.negotiation.stall import MAX_NAMES, Answers, LastCall, SetMember, StallWatch
from tests.harness.growth import MAX_SLOPE, slope
from tests.negotiation.negotiating import Ranks

SETTINGS = Settings(stall_s=30.0, stall_abort_s=100.0)
RANKS_PER_NODE = 64


def of_nodes(size):
    nodes = [
        range(first, min(first + RANKS_PER_NODE, size)) for first in range(0, size, RANKS_PER_NODE)
    ]
    members = [list(ranks) for ranks in nodes]
    return [tree_of(members, rank) for rank in range(size)]


class Stalled(Ranks):
    """Negotiators with stall watches, which exchange messages as ``ProgressEngine`` does."""

    def __init__(self, size, settings=SETTINGS):
        super().__init__(of_nodes(size))
        members = [SetMember(rank, f"node{rank // RANKS_PER_NODE}") for rank in range(size)]
        self.watches = [StallWatch(settings, rank, members, LastCall()) for rank in range(size)]
        self.pending = [{} for _ in range(size)]
        self.deaf, self.now, self.reports = set(), 0.0, []
        for watch, negotiator in zip(self.watches, self.negotiators, strict=True):
            watch.num_children = len(negotiator._tree.children)

    def post(self, rank, *, decide=True, partial=False):
        if rank in self.deaf:
            return
        watch, relay = self.watches[rank], self.negotiators[rank].relay
        for question in relay.take_questions():
            watch.answer_to(self.now, question, self.pending[rank])
        for answers in relay.take_received():
            watch.take(answers)
        relay.answers += watch.for_parent(self.now, partial=partial)
        self.reports += watch.reports(self.now)
        for question in watch.take_finished() if partial else ():
            relay.finish(question)
        super().post(rank, decide=decide)

    def tick(self, random, step_s=1.0):
        """Let time pass: each rank asks what is due, in random order among deliveries."""
        self.now += step_s
        for rank in random.sample(range(len(self.watches)), len(self.watches)):
            question = self.watches[rank].due(self.now, self.pending[rank])
            if question is not None:
                self.negotiators[rank].relay.asked.append(question)
            self.post(rank, partial=True)
            for edge in random.sample(self.waiting(), min(3, len(self.queues))):
                self.deliver(edge)
                self.post(edge[1])
        self.settle()

    def submit(self, name, ranks, now=0.0):
        for rank in ranks:
            self.pending[rank][name] = now


def stalled_run(size, *, missing=5, deaf=(), seconds=20, name="loss"):
    """Run until the report of an operation that all ranks but one have submitted."""
    ranks, random = Stalled(size), Random(size)
    ranks.deaf = set(deaf)
    ranks.submit(name, set(range(size)) - {missing})
    ranks.now = 28.0
    while ranks.now < 28.0 + seconds:
        ranks.tick(random)
    return ranks


def counts_of(ranks):
    """Return the numbers of messages, of messages to the root, and of bytes to the root."""
    to_root = [message for _, dest, message in ranks.messages if dest == 0]
    return len(ranks.messages), len(to_root), sum(map(len, to_root))


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
    size, seconds = 256, 20
    ranks, random = Stalled(size), Random(1)
    for rank in range(size):
        ranks.submit(f"noname.{rank}", [rank])
    ranks.now = 29.0
    for _ in range(seconds):
        ranks.tick(random)
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
