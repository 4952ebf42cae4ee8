"""Properties of the negotiation for any order of announcements and deliveries, on any tree."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.units import format_ranks
from hpctrain.negotiation.messages import Entry, OperationBatch
from hpctrain.negotiation.request import Signature
from tests.negotiation.negotiating import Ranks, random_trees, signature_of


class Script:
    """The submissions of each rank: each name once per round, then possibly a join."""

    def __init__(self, random: Random, size: int) -> None:
        self.names = [f"t{index}" for index in range(random.randint(1, 5))]
        self.has_joins = random.random() < 0.5
        self.epochs = [self.epoch(random, size) for _ in range(random.randint(1, 3))]

    def epoch(self, random: Random, size: int) -> "list[list[list[tuple[str, Signature]]]]":
        """Return the submissions of each rank in each round, in the rank's own order."""
        num_rounds = random.randint(1, 4)
        rounds = [num_rounds] * size
        if self.has_joins:
            rounds = [random.randint(0, num_rounds) for _ in range(size)]
        odd = {
            (index, name): random.sample(range(size), random.randint(0, min(size, 2)))
            for index in range(num_rounds)
            for name in self.names
            if random.random() < 0.2
        }
        shape = {
            (index, name): random.randint(1, 2) if random.random() < 0.2 else 4
            for index in range(num_rounds)
            for name in self.names
        }
        return [
            [
                [
                    (name, signature_of([9 if rank in odd.get(key, ()) else shape[key]]))
                    for name in random.sample(self.names, len(self.names))
                    for key in [(index, name)]
                ]
                for index in range(rounds[rank])
            ]
            for rank in range(size)
        ]


class Player:
    """Rank that executes the script; submits a name again only after a decision on it."""

    def __init__(self, ranks: Ranks, rank: int, script: Script) -> None:
        self.negotiator = ranks.negotiators[rank]
        self.steps: list[tuple[str, Signature] | None] = []
        for epoch in script.epochs:
            self.steps += [step for some in epoch[rank] for step in some]
            self.steps += [None] * script.has_joins
        self.batches = ranks.batches[rank]
        self.num_joins = 0

    def play(self) -> bool:
        """Execute the next step if possible; return True if it was executed."""
        overs = sum(batch.join_over is not None for batch in self.batches)
        if not self.steps or overs < self.num_joins:
            return False
        if self.steps[0] is None:
            self.negotiator.join()
            self.num_joins += 1
        elif self.steps[0][0] in self.negotiator._announced:
            return False
        else:
            self.negotiator.announce(*self.steps[0])
        self.steps.pop(0)
        return True


def played(random: Random, size: int, script: Script) -> Ranks:
    """Play the script, with submissions and deliveries in random order."""
    ranks = Ranks(random_trees(size, random), num_slots=random.choice([1, 3, 4096]))
    players = [Player(ranks, rank, script) for rank in range(size)]
    decides = random.choice([0.2, 1.0])
    idle = 0
    while idle < 3:
        moved = False
        for player in random.sample(players, size):
            while random.random() < 0.7 and player.play():
                moved = True
        for rank in random.sample(range(size), size):
            if random.random() < 0.7:
                ranks.post(rank, decide=random.random() < decides or idle > 0)
        for edge in ranks.waiting():
            moved = True
            while edge in ranks.queues and random.random() < 0.8:
                ranks.deliver(edge)
        idle = 0 if moved else idle + 1
        if idle:
            for rank in range(size):
                ranks.post(rank)
            idle = 0 if ranks.waiting() or any(player.play() for player in players) else idle
    assert not any(player.steps for player in players)
    return ranks


def expected(script: Script, size: int) -> list[list[dict[str, dict[Signature, list[int]]]]]:
    """Return the ranks by epoch, round, name and signature."""
    result = []
    for epoch in script.epochs:
        rounds = []
        for index in range(max(len(some) for some in epoch)):
            given: dict[str, dict[Signature, list[int]]] = {name: {} for name in script.names}
            for rank in range(size):
                for name, signature in epoch[rank][index] if index < len(epoch[rank]) else ():
                    given[name].setdefault(signature, []).append(rank)
            rounds.append(given)
        result.append(rounds)
    return result


def by_name(batches: list[OperationBatch], name: str) -> list[list[Entry]]:
    """Return the decisions on one name, by epoch."""
    result: list[list[Entry]] = [[]]
    for batch in batches:
        result[-1] += [entry for entry in batch.entries if entry.name == name]
        if batch.join_over is not None:
            result.append([])
    return result


@given(st.integers(0, 2**32), st.integers(1, 40) | st.integers(1, 4))
@settings(max_examples=150, deadline=None)
def test_any_order_gives_the_same_batches_on_every_rank(seed: int, size: int):
    random = Random(seed)
    script = Script(random, size)
    ranks = played(random, size, script)
    first, *others = ranks.batches
    assert all(batches == first for batches in others)
    assert all(not negotiator._announced for negotiator in ranks.negotiators)
    assert not any(n._pending._parts or any(n._pending.bits) for n in ranks.negotiators)
    slots = [(n.cache.numbers, n.cache.entries) for n in ranks.negotiators]
    assert all(some == slots[0] for some in slots)
    want = expected(script, size)
    for name in script.names:
        got = by_name(first, name)
        if script.has_joins:
            assert got.pop() == []
            entries = got
        else:
            want = [[some for epoch in want for some in epoch]]
            entries = got
        assert [len(epoch) for epoch in entries] == [len(epoch) for epoch in want]
        for epoch, rounds in zip(entries, want, strict=True):
            for entry, given_by in zip(epoch, rounds, strict=True):
                check(entry, given_by[name])
    overs = [batch.join_over for batch in first if batch.join_over is not None]
    assert len(overs) == len(script.epochs) * script.has_joins


def check(entry: Entry, given_by: dict[Signature, list[int]]) -> None:
    assert entry.signature in given_by
    if len(given_by) == 1:
        assert entry.error is None
        return
    assert entry.error is not None
    for signature, members in given_by.items():
        text = f"{signature.describe()} on {format_ranks(members)}"
        assert f"{text} and" in entry.error or f"{text};" in entry.error
