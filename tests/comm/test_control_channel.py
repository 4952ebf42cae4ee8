"""Mailboxes between ranks: through the memory of a node, between nodes, and flat over MPI."""

import random
import threading
import time

import pytest

from hpctrain.comm.factory import Connection, connect
from hpctrain.comm.mpi_world import find_world
from hpctrain.comm.threaded import ThreadedCommunicator
from hpctrain.core.errors import RankLostError
from tests.comm.conftest import PATHS, close

LONG_S = 60.0


@pytest.fixture(params=[name for name in PATHS if name != "MPI window"])
def connection(request):
    """Connect by each path in turn; a window is node memory like any other."""
    made = connect(find_world(), PATHS[request.param])
    yield made
    close(made)


@pytest.fixture
def post(comm):
    made = comm.mail()
    yield made
    comm.barrier()
    made.close()


def take(post, number):
    """Return so many messages, by sender."""
    found = {rank: [] for rank in post.tree.neighbours}
    while sum(map(len, found.values())) < number:
        for source, message in post.receive():
            found[source].append(message)
        if sum(map(len, found.values())) < number:
            assert post.sleep(LONG_S)
    post.flush()
    return found


def messages(sender, receiver, number, largest):
    chance = random.Random(1000 * sender + receiver)
    sizes = [0, *(chance.choice((7, 40, 500, largest)) for _ in range(number - 1))]
    return [chance.randbytes(chance.randint(0, size)) for size in sizes]


@pytest.mark.ranks(1, 2, 3, 4)
def test_the_tree_has_all_ranks_and_rank_0_at_its_root(comm, post):
    trees = comm.allgather_object(post.tree)
    assert [tree.rank for tree in trees] == list(range(comm.size))
    assert [tree.rank for tree in trees if tree.parent is None] == [0]
    for tree in trees:
        assert tree.size == comm.size
        assert all(trees[child].parent == tree.rank for child in tree.children)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("largest", [2_000, 400_000])
def test_messages_of_any_size_arrive_once_and_in_order_both_ways_at_once(comm, post, largest):
    number = 200 if largest < 10_000 else 8
    me, neighbours = comm.rank, post.tree.neighbours
    found = {rank: [] for rank in neighbours}
    leaving = {rank: messages(me, rank, number, largest) for rank in neighbours}
    for i in range(number):
        for rank in neighbours:
            post.send(rank, leaving[rank][i])
        if i % 3 == me:
            for source, message in post.receive():
                found[source].append(message)
    missing = len(neighbours) * number - sum(map(len, found.values()))
    for source, rest in take(post, missing).items():
        found[source] += rest
    for rank in neighbours:
        assert found[rank] == messages(rank, me, number, largest)
    assert not post.receive()


@pytest.mark.ranks(2, 4)
def test_a_flush_returns_when_large_messages_have_left_and_keeps_what_it_reads(comm, post):
    for child in post.tree.children:
        post.send(child, bytes([comm.rank]) * 300_000)
    found = []
    if post.tree.parent is not None:
        post.send(post.tree.parent, b"up")
        while (post.tree.parent, bytes([post.tree.parent]) * 300_000) not in found:
            post.sleep(LONG_S)
            found += post.receive()
    post.flush(down=True)
    comm.barrier()  # nobody sends, receives or sleeps meanwhile
    while len(found) < len(post.tree.neighbours):
        found += post.receive()
    assert {(child, b"up") for child in post.tree.children} <= {*found}


@pytest.mark.ranks(1, 2)
def test_a_ring_from_another_thread_ends_a_sleep(post):
    for watch in (True, False):
        timer = threading.Timer(0.05, post.ring)
        timer.start()
        assert post.sleep(LONG_S, watch=watch, spin=False)
        timer.join()


@pytest.mark.ranks(1, 2)
def test_many_rings_end_one_sleep_and_a_silent_sleep_lasts_its_time(comm, post):
    comm.barrier()
    for _ in range(100):
        post.ring()
    assert post.sleep(LONG_S)
    for watch in (True, False):
        start = time.monotonic()
        assert not post.sleep(0.03, watch=watch)
        assert time.monotonic() - start >= 0.03
    comm.barrier()


@pytest.mark.ranks(2, 4)
def test_a_message_ends_a_sleep(comm, post):
    if comm.rank == 0:
        time.sleep(0.05)
        for child in post.tree.children:
            post.send(child, b"from above")
        take(post, len(post.tree.children))
    else:
        found = []
        while not found:
            assert post.sleep(LONG_S, watch=comm.rank != 1)
            found = [one for one in post.receive() if one[0] == post.tree.parent]
        assert found == [(post.tree.parent, b"from above")]
        for child in post.tree.children:
            post.send(child, b"from above")
        take(post, len(post.tree.children))
        post.send(post.tree.parent, b"here")


@pytest.mark.ranks(1, 3)
def test_each_call_makes_mailboxes_of_its_own_for_groups_too(comm):
    posts = [comm.mail(), comm.mail()]
    group = comm.group(range(comm.size)[::-1])
    assert group is not None
    posts.append(group.mail())
    for number, post in enumerate(posts):
        for rank in post.tree.neighbours:
            post.send(rank, bytes([number]))
    for number, post in reversed([*enumerate(posts)]):
        found = take(post, len(post.tree.neighbours))
        assert all(received == [bytes([number])] for received in found.values())
    assert posts[2].tree.rank == comm.size - 1 - comm.rank
    comm.barrier()
    for post in posts:
        post.close()
    group.close()


@pytest.mark.ranks(1, 2)
def test_a_threaded_communicator_has_mailboxes_that_the_caller_uses():
    connection = connect(find_world(), PATHS["one node"])
    comm = ThreadedCommunicator(connection.comm)
    post = comm.mail()
    for rank in post.tree.neighbours:
        post.send(rank, b"hello")
    take(post, len(post.tree.neighbours))
    post.close()
    comm.drain()
    close(connection)


def leave_early(connection: Connection) -> None:
    """Take leave in rank 1, and let the others sleep for its message until they notice."""
    comm = connection.comm
    post = comm.mail()
    if comm.rank == 1:
        connection.presence.farewell()
        return
    with pytest.raises(RankLostError, match="rank 1 left the program while rank"):
        post.sleep(LONG_S)
    post.send(1, bytes(10_000_000))
    with pytest.raises(RankLostError, match="rank 1 left the program while rank"):
        post.flush()
    connection.presence.farewell()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("path", ["one node", "nodes of one"])
def test_who_sleeps_or_flushes_hears_that_a_rank_has_left(path):
    connection = connect(find_world(), PATHS[path])
    leave_early(connection)
    connection.comm.close()
