"""The submission queue: one operation of a name in flight, in the order of submission."""

import random
from collections import defaultdict

import pytest

from hpctrain.core.errors import DuplicateNameError
from hpctrain.negotiation.request import Handle, Kind, Request
from hpctrain.negotiation.submission_queue import CLOSE, JOIN, NUM_UNNAMED, SubmissionQueue


def entered(queue: SubmissionQueue, kind: Kind = Kind.BARRIER, name: str | None = None) -> Handle:
    handle = Handle(None, Request(kind, None, ()), name)
    queue.enter(handle)
    return handle


def complete(queue: SubmissionQueue, handle: Handle) -> None:
    del queue.in_flight[handle.name]
    queue.submit_held()


@pytest.mark.parametrize("seed", range(5))
def test_names_in_flight_are_unique_and_operations_of_a_name_keep_their_order(seed):
    queue, chance = SubmissionQueue(), random.Random(seed)
    given, announced = defaultdict(list), defaultdict(list)
    announced_in_flight: list[Handle] = []
    left = 3 * NUM_UNNAMED
    while left or announced_in_flight or queue.submitted:
        for _ in range(min(left, chance.randrange(2 * NUM_UNNAMED))):
            kind = chance.choice([Kind.ALLREDUCE, Kind.BROADCAST])
            handle = entered(queue, kind)
            given[handle.name].append(handle)
            left -= 1
        while queue.submitted:
            handle = queue.submitted.popleft()
            announced[handle.name].append(handle)
            announced_in_flight.append(handle)
        assert len({handle.name for handle in announced_in_flight}) == len(announced_in_flight)
        chance.shuffle(announced_in_flight)
        for _ in range(min(len(announced_in_flight), chance.randrange(1, NUM_UNNAMED))):
            complete(queue, announced_in_flight.pop())
    assert announced == given
    assert len(given) <= 2 * NUM_UNNAMED
    assert not queue.held
    assert not queue.is_awaited


@pytest.mark.parametrize("last", [JOIN, CLOSE])
def test_a_join_or_close_is_announced_after_all_operations_before_it(last):
    queue = SubmissionQueue()
    handles = [entered(queue) for _ in range(NUM_UNNAMED + 1)]  # the last one is held
    end = entered(queue, name=last)
    assert [*queue.submitted] == handles[:-1]
    complete(queue, queue.submitted.popleft())
    assert [*queue.submitted] == [*handles[1:], end]


def test_a_user_defined_name_is_in_flight_once():
    queue = SubmissionQueue()
    first = entered(queue, name="loss")
    with pytest.raises(DuplicateNameError, match="'loss' is already in flight"):
        entered(queue, name="loss")
    assert [*queue.submitted] == [first]
    complete(queue, first)
    entered(queue, name="loss")


def test_take_all_returns_every_operation_and_numbers_restart_after_a_join():
    queue = SubmissionQueue()
    handles = [entered(queue) for _ in range(NUM_UNNAMED + 3)]
    queue.joining.append(Handle(None, Request(Kind.BARRIER, None, ()), JOIN))
    [joined] = queue.end_join()
    assert joined.name == JOIN
    queue.joining.append(joined)
    assert set(queue.take_all()) == {*handles, joined}
    assert not queue.is_awaited
    assert not queue.submitted
    assert not queue.held
    assert entered(queue).name == handles[0].name
