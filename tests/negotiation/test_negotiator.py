"""The negotiator, one message at a time."""

from typing import NamedTuple

import pytest

from hpctrain.negotiation.messages import (
    BITS,
    REPORT,
    SLOTS,
    VECTOR,
    Entry,
    OperationBatch,
    pack_slots,
    unpack_slots,
)
from hpctrain.negotiation.pending_table import ResponseCache
from hpctrain.negotiation.request import Kind, Repeated
from tests.negotiation.negotiating import Ranks, chain, signature_of, star

FOUR, FIVE = signature_of([4]), signature_of([5])
FROM_1 = signature_of([4], Kind.BROADCAST, root=1)


def announced(ranks: Ranks, *names: str, signature=FOUR) -> list[OperationBatch]:
    """Announce all names on all ranks; return the decisions."""
    for negotiator in ranks.negotiators:
        for name in names:
            negotiator.announce(name, signature)
    return ranks.settle()


def plain(*names: str) -> tuple[Entry, ...]:
    return tuple(Entry(name, FOUR) for name in names)


def test_ready_operations_form_one_batch_in_the_order_of_the_root():
    ranks = Ranks(star(2))
    root, other = ranks.negotiators
    for again in range(3):
        for name in "cab":
            root.announce(name, FOUR)
        for name in "abc":
            other.announce(name, FOUR)
        ranks.post(1)
        ranks.deliver((1, 0))
        assert root.outbox(decide=False) == []
        assert ranks.settle() == [OperationBatch(plain("c", "a", "b"), None)], again


def test_a_thousand_cached_names_are_sent_as_one_bit_vector_per_direction():
    names = [f"layers.{index}.weight" for index in range(1000)]
    ranks = Ranks(star(3))
    announced(ranks, *names)
    ranks.messages.clear()
    assert announced(ranks, *names) == [OperationBatch(plain(*names), None)]
    kinds = [(source, dest, message[0]) for source, dest, message in ranks.messages]
    assert kinds == [(1, 0, BITS), (2, 0, BITS), (0, 1, VECTOR), (0, 2, VECTOR)]
    assert max(len(message) for _, _, message in ranks.messages) < 140
    ranks.messages.clear()
    announced(ranks, names[-1])
    kinds = [(message[0], len(message)) for *_, message in ranks.messages]
    assert kinds == [*[(BITS, 126)] * 2, *[(SLOTS, 3)] * 2]


@pytest.mark.parametrize("slots", [[0], [4095], [7, 3], list(range(1000)), [5, *range(900)]])
def test_packed_slots_keep_their_order(slots):
    assert unpack_slots(pack_slots(slots)) == slots


def test_a_mismatch_names_every_rank_and_is_cleared_afterwards():
    ranks = Ranks(chain(6))
    announced(ranks, "a")
    for rank, negotiator in enumerate(ranks.negotiators):
        negotiator.announce("a", FIVE if rank in (2, 4) else FOUR)
    [batch] = ranks.settle()
    [entry] = batch.entries
    assert entry == Entry("a", FOUR, entry.error)
    assert entry.error == (
        'operation "a" must be the same on all ranks, got allreduce (sum) of float32 [4] on ranks '
        "0-1,3,5 and allreduce (sum) of float32 [5] on ranks 2,4; submit it with the same kind, "
        "dtype, shape, op, factors, root rank and device on every rank, or give different "
        "operations different names"
    )
    assert announced(ranks, "a", signature=FIVE) == [
        OperationBatch((Entry("a", FIVE, None),), None)
    ]


def test_a_mismatch_of_many_ranks_is_a_short_text():
    ranks = Ranks(star(1000))
    for rank, negotiator in enumerate(ranks.negotiators):
        negotiator.announce("a", signature_of([rank]))
    [batch] = ranks.settle()
    assert "float32 [7] on rank 7 and 992 others on ranks 8-999; submit" in batch.entries[0].error


def test_a_mismatch_in_a_group_shows_only_the_different_tensors():
    ranks = Ranks(star(2))
    group = FOUR._replace(dtypes=FOUR.dtypes * 9, shapes=FOUR.shapes * 9, devices=("cpu",) * 9)
    shapes = (*group.shapes[:6], FIVE.shapes[0], *group.shapes[7:])
    for negotiator, given in zip(
        ranks.negotiators, [group, group._replace(shapes=shapes)], strict=True
    ):
        negotiator.announce("g", given)
    [batch] = ranks.settle()
    assert (
        "allreduce (sum) of float32 [4] on rank 0 and allreduce (sum) of float32 [5] on rank 1 "
        "(tensors 7 of a group of 9)" in str(batch.entries[0].error)
    )


def test_a_shape_that_changes_on_all_ranks_is_accepted_and_cached():
    ranks = Ranks(chain(3))
    announced(ranks, "a")
    assert announced(ranks, "a", signature=FIVE)[0].entries[0].signature == FIVE
    ranks.messages.clear()
    announced(ranks, "a", signature=FIVE)
    assert {message[0] for *_, message in ranks.messages} == {BITS, VECTOR}


def test_a_new_signature_invalidates_repeated_announcements():
    cache, repeated = ResponseCache(), [Repeated("a", FOUR)]
    cache.put("a", FOUR)
    assert cache.numbers_of(repeated).slots == {"a": 0}
    cache.put("a", FIVE)
    assert cache.numbers_of(repeated) is None


def test_slots_are_assigned_to_the_first_names():
    ranks = Ranks(star(2), num_slots=2)
    for name in "abac":
        announced(ranks, name)
    for name, kind in (("a", BITS), ("b", BITS), ("c", REPORT)):
        ranks.messages.clear()
        announced(ranks, name)
        assert ranks.messages[0][2][0] == kind, name


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2], [2, 3, 1, 0]])
@pytest.mark.parametrize("shape", [chain, star])
def test_the_last_rank_to_join_is_reported_in_every_epoch(order, shape):
    ranks = Ranks(shape(4))
    for _ in range(2):
        batches = []
        for rank in order:
            assert batches == []
            ranks.negotiators[rank].join()
            batches = ranks.settle()
        assert batches == [OperationBatch((), order[-1])]


def test_a_broadcast_fails_if_its_root_has_joined():
    ranks = Ranks(star(3))
    one = ranks.negotiators[1]
    one.announce("early", FROM_1)
    one.join()
    ranks.negotiators[2].join()
    for name in ("early", "late"):
        ranks.negotiators[0].announce(name, FROM_1)
    [batch] = ranks.settle()
    early, late = batch.entries
    assert early == Entry("early", FROM_1, None)
    assert late.error == (
        'the root of a broadcast must submit it, but the root of "late" is rank 1, which has '
        "joined; call join() on that rank after its last broadcast, or choose another root"
    )


class Numbers(NamedTuple):
    """Question with a set of numbers."""

    numbers: frozenset[int]
    kind: str = "numbers"

    def merged(self, other):
        return self._replace(numbers=self.numbers | other.numbers)

    def without(self, other):
        rest = self.numbers - other.numbers
        return self._replace(numbers=rest) if rest else None


@pytest.mark.parametrize("asker", [0, 2, 3])
def test_a_question_reaches_all_ranks_once_and_answers_the_parent(asker):
    ranks = Ranks(chain(4))
    ranks.negotiators[3].join()
    ranks.settle()
    relays = [negotiator.relay for negotiator in ranks.negotiators]
    question = Numbers(frozenset([1]))
    relays[asker].asked.append(question)
    ranks.settle()
    for rank, relay in enumerate(relays):
        assert relay.take_questions() == [question]
        assert relay.take_questions() == []
        relay.answers += [f"from {rank}"] if rank else []
    ranks.settle()
    for rank, relay in enumerate(relays):
        assert relay.take_received() == ([f"from {rank + 1}"] if rank < 3 else [])
        assert relay.take_received() == []


def test_questions_of_all_ranks_are_merged_and_asked_one_after_the_other():
    ranks = Ranks(chain(4))
    relays = [negotiator.relay for negotiator in ranks.negotiators]
    asked = []
    for rank in (2, 0, 3, 1):
        for kind in ("a", "b"):
            relays[rank].asked.append(Numbers(frozenset([rank, 9]), kind))
        ranks.post(rank)
    for _ in range(4):
        ranks.settle()
        orders = [relay.take_questions() for relay in relays]
        assert orders[1:] == orders[:1] * 3
        assert [question.kind for question in orders[0]] in (["a", "b"], [])
        asked += [n for question in orders[0] if question.kind == "a" for n in question.numbers]
        for question in orders[0]:
            relays[0].finish(question)
    assert sorted(asked) == [0, 1, 2, 3, 9]
    assert not any(relay.asked for relay in relays)


def test_an_operation_that_is_ready_while_decisions_are_suspended_is_decided_later():
    ranks = Ranks(star(2))
    for again in range(2):
        for negotiator in ranks.negotiators:
            negotiator.announce("a", FOUR)
        ranks.post(1)
        ranks.deliver((1, 0))
        for _ in range(2):
            assert ranks.negotiators[0].outbox(decide=False) == [], again
        assert ranks.settle() == [OperationBatch(plain("a"), None)], again


def test_a_rank_takes_part_until_it_has_taken_the_decision():
    ranks = Ranks(star(2))
    root, other = ranks.negotiators
    for negotiator in (root, other):
        negotiator.announce("a", FOUR)
        assert negotiator.takes_part
    ranks.post(1)
    ranks.deliver((1, 0))
    ranks.post(0)
    assert not root.takes_part
    ranks.deliver((0, 1))
    assert other.takes_part  # the decision would overwrite operations prepared now
    assert other.decided()
    assert not other.takes_part
