"""Check that ranks exchange texts only after an error or a difference, and then few of them."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from hpctrain.comm.agreement import (
    agreed,
    gather_distinct,
    is_any,
    raise_if_refused,
    require_equal,
    require_equal_by,
)
from hpctrain.core.errors import ConfigError, MismatchError
from hpctrain.runtime.last_check import LastStates, compare


class Ranks:
    """Simulate ranks by threads, and count the objects that they gather."""

    def __init__(self, size):
        self.size, self.slots = size, [None] * size
        self.gathered, self.num_bytes = [], []
        self.all_arrived = threading.Barrier(size, self.count)
        self.all_left = threading.Barrier(size)

    def count(self):
        self.gathered.append(sum(value is not None for value in self.slots))
        self.num_bytes.append(sum(len(str(value)) for value in self.slots))

    def run(self, work):
        """Return ``work(rank, gather)`` of each rank."""

        def gather_of(rank):
            def gather(value):
                self.slots[rank] = value
                self.all_arrived.wait(10)
                found = list(self.slots)
                self.all_left.wait(10)
                return found

            return gather

        with ThreadPoolExecutor(self.size) as threads:
            return list(threads.map(lambda rank: work(rank, gather_of(rank)), range(self.size)))


@pytest.mark.parametrize("num_distinct", [1, 2, 3, 8, 9, 20])
def test_one_rank_sends_each_of_a_few_distinct_values(num_distinct):
    ranks = Ranks(20)
    lines = [[f"line {rank % num_distinct}"] * 100 for rank in range(20)]
    by_rank = ranks.run(lambda rank, gather: gather_distinct(gather, lines[rank]))
    expected = [each if rank % num_distinct < 8 else None for rank, each in enumerate(lines)]
    assert by_rank == [expected if num_distinct > 1 else []] * 20
    assert ranks.gathered == ([20, min(8, num_distinct)] if num_distinct > 1 else [20])


def test_first_difference_of_some_ranks_is_reported():
    def message(rank, gather):
        lines = ["equal", *(["more"] if rank else []), *(["last"] if rank in (2, 3) else [])]
        with pytest.raises(MismatchError) as error:
            require_equal_by(gather, lines, "parameters")
        return str(error.value)

    expected = (
        "parameters must be the same on every rank, but entry 1, counted from 0, differs: rank 0: "
        "none; ranks 1-4: more; build the same model on every rank"
    )
    assert Ranks(5).run(message) == [expected] * 5


@pytest.mark.ranks(1, 2, 3, 4)
def test_no_objects_are_gathered_without_a_refusal(comm, monkeypatch):
    def gather(*_):
        raise AssertionError("objects are gathered")

    monkeypatch.setattr(comm, "allgather_object", gather)
    comm.agree(True)
    raise_if_refused(comm, None)
    with agreed(comm):
        pass
    require_equal(comm, ["a line", "another"], "lines")
    assert not is_any(comm, mine=False)


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_refusal_of_any_rank_is_raised_on_all_ranks(world, comm):
    for rank in range(world.size):
        assert is_any(comm, mine=world.rank == rank)
        with pytest.raises(ConfigError, match=rf"^(rank {rank}: )?refused$"):
            raise_if_refused(comm, "refused" if world.rank == rank else None, ConfigError)
        if world.size > 1:
            with pytest.raises(MismatchError, match=f"entry 1, .* rank {rank}: other"):
                require_equal(comm, ["a", "other" if world.rank == rank else "b"], "lines")
    comm.barrier()


class Holder:
    """Hold a state that is different on each rank."""

    def __init__(self, rank):
        self.rank = rank

    def state_of(self, _, *, has_weights=True):
        return {"steps": "3", **{f"weight {i}": str(self.rank) for i in range(100 * has_weights)}}


def test_few_of_many_different_last_states_are_sent():
    ranks = Ranks(20)
    sets = SimpleNamespace(
        shut_down_broken=bool, by_number=dict, communicators=dict, everyone=SimpleNamespace(rank=1)
    )

    def message(rank, gather):
        holder, states = Holder(rank), LastStates()
        states.enter(tuple(range(20)), holder.state_of)
        return compare(sets, {}, states, "error", gather)

    found = set(ranks.run(message))
    assert len(found) == 1
    assert "weight 0 (rank 0: 0; rank 1: 1;" in next(iter(found))
    assert "rank 7: 7) and 99 more" in next(iter(found))
    assert [num_bytes > 9000 for num_bytes in ranks.num_bytes] == [False, False, True]
    assert ranks.num_bytes[-1] < 9 * max(map(len, ranks.slots))
