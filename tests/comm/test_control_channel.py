"""Check mailboxes between ranks: through node memory, between nodes, and flat over MPI."""

import ctypes
import random
import threading
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.comm.control_channel.mailbox import FAN_OUT, Tree, nodes_of, tree_of
from hpctrain.comm.control_channel.ring import HEAD_BYTES, RING_BYTES, Inlet, Outlet
from hpctrain.comm.node import segments
from hpctrain.comm.node.segments import Semaphore, fence_of
from hpctrain.core.errors import RankLostError
from tests.comm.conftest import PATHS, connected
from tests.harness.growth import MAX_SLOPE, slope_of

LONG_S = 60.0


@pytest.fixture
def post(comm):
    made = comm.new_mailbox()
    yield made
    comm.barrier()
    made.close()


def take(post, number):
    """Return ``number`` messages, by sender."""
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
def test_flush_returns_when_large_messages_were_sent_and_keeps_received_ones(comm, post):
    for child in post.tree.children:
        post.send(child, bytes([comm.rank]) * 300_000)
    found = []
    if post.tree.parent is not None:
        post.send(post.tree.parent, b"up")
        while (post.tree.parent, bytes([post.tree.parent]) * 300_000) not in found:
            post.sleep(LONG_S)
            found += post.receive()
    post.flush(down=True)
    comm.barrier()  # no rank sends, receives or sleeps at this point
    while len(found) < len(post.tree.neighbours):
        found += post.receive()
    assert {(child, b"up") for child in post.tree.children} <= {*found}


@pytest.mark.ranks(1, 2)
def test_ring_of_any_thread_ends_one_sleep_and_other_sleeps_time_out(comm, post):
    comm.barrier()
    timer = threading.Timer(0.05, post.ring)
    timer.start()
    assert post.sleep(LONG_S)
    timer.join()
    for _ in range(100):
        post.ring()
    assert post.sleep(LONG_S)
    start = time.monotonic()
    assert not post.sleep(0.03)
    assert time.monotonic() - start >= 0.03
    comm.barrier()


@pytest.mark.ranks(1, 3)
def test_each_call_makes_separate_mailboxes_for_groups_too(comm):
    posts = [comm.new_mailbox(), comm.new_mailbox()]
    group = comm.group(range(comm.size)[::-1])
    assert group is not None
    posts.append(group.new_mailbox())
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


@pytest.mark.ranks(2)
@pytest.mark.parametrize("path", ["one node", "nodes of one"])
def test_sleep_and_flush_raise_when_a_rank_has_left(path):
    with connected(PATHS[path]) as connection:
        post = connection.comm.new_mailbox()
        if connection.comm.rank == 0:
            with pytest.raises(RankLostError, match="rank 1 left the program while rank"):
                post.sleep(LONG_S)
            post.send(1, bytes(10_000_000))
            with pytest.raises(RankLostError, match="rank 1 left the program while rank"):
                post.flush()


@st.composite
def worlds(draw: st.DrawFn) -> list[list[int]]:
    """Assign ranks to nodes, in any order."""
    sizes = draw(st.lists(st.integers(1, 9), min_size=1, max_size=40))
    ranks = list(range(sum(sizes)))
    random.Random(draw(st.integers())).shuffle(ranks)
    return [[ranks.pop() for _ in range(size)] for size in sizes]


def trees_of(nodes: list[list[int]]) -> list[Tree]:
    return [tree_of(nodes, rank) for rank in range(sum(map(len, nodes)))]


def test_nodes_of_all_ranks_are_found_in_linear_time():
    def work(num_nodes):
        leaders = [rank % num_nodes for rank in range(4 * num_nodes)]
        return lambda: nodes_of(leaders)

    assert nodes_of([0, 1, 0, 3, 1]) == [[0, 2], [1, 4], [3]]
    assert slope_of(work, (64, 1024)) < MAX_SLOPE


def path_to_root(trees: list[Tree], rank: int) -> list[int]:
    path = [rank]
    while (parent := trees[path[-1]].parent) is not None:
        path.append(parent)
    return path


@given(worlds())
def test_tree_connects_every_rank_with_rank_0_by_symmetric_edges(nodes):
    trees = trees_of(nodes)
    for rank, tree in enumerate(trees):
        assert tree.rank == rank
        assert path_to_root(trees, rank)[-1] == 0
        assert all(trees[child].parent == rank for child in tree.children)
        assert tree.parent is None or rank in trees[tree.parent].children
        assert set(tree.neighbours) == {*tree.children, tree.parent} - {None}
        assert len(tree.children) == len(set(tree.children)) <= 2 * FAN_OUT
    # Only the first rank of a node has a parent on another one.
    node_of = {rank: node for node, ranks in enumerate(nodes) for rank in ranks}
    for ranks in nodes:
        for rank in set(ranks) - {min(ranks)}:
            assert node_of[trees[rank].parent] == node_of[rank]


def test_a_thousand_ranks_are_a_few_steps_from_the_root():
    one_each = trees_of([[rank] for rank in range(1000)])
    of_sixteen = trees_of([list(range(n, n + 16)) for n in range(0, 1008, 16)])
    assert max(len(path_to_root(one_each, rank)) for rank in range(1000)) - 1 == 5
    assert max(len(path_to_root(of_sixteen, rank)) for rank in range(1008)) - 1 == 5


SIZES = st.one_of(
    st.integers(0, 200),
    st.integers(RING_BYTES - 20, RING_BYTES + 20),
    st.integers(0, 5 * RING_BYTES),
)


def semaphore() -> Semaphore:
    made = Semaphore((ctypes.c_char * 64)())
    made.initialise()
    return made


class Pair:
    """Hold both ends of a ring in one process."""

    def __init__(self) -> None:
        memory = np.zeros((HEAD_BYTES + RING_BYTES) // 8, np.uint64).view(np.uint8).data
        fence = fence_of(semaphore())
        self.reader_bell, self.writer_bell = semaphore(), semaphore()
        self.outlet = Outlet(memory, self.reader_bell, fence)
        self.inlet = Inlet(memory, self.writer_bell, fence)


def message(number: int, num_bytes: int) -> bytes:
    return bytes([number % 251]) * num_bytes


@pytest.mark.parametrize("in_order", [True, False], ids=["no fences", "fences"])
@given(st.lists(st.one_of(SIZES.map(lambda size: ("send", size)), st.just(("receive", 0)))))
def test_messages_of_any_size_arrive_in_order(in_order, steps):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(segments, "STORES_IN_ORDER", in_order)
        pair = Pair()
    sent, received = [], []
    for what, size in steps:
        if what == "send":
            sent.append(message(len(sent), size))
            pair.outlet.send(sent[-1])
        else:
            received += pair.inlet.receive() or []
            assert received == sent[: len(received)]
    while len(received) < len(sent):
        if pair.outlet.is_stuck and pair.writer_bell.try_wait():
            pair.outlet.push()
        assert pair.reader_bell.try_wait()  # nothing arrives without a ring of the bell
        received += pair.inlet.receive() or []
    assert received == sent
    assert not pair.outlet.is_stuck
    assert pair.inlet.receive() is None


def test_read_wakes_a_writer_that_found_the_ring_full():
    pair = Pair()
    pair.outlet.send(bytes(RING_BYTES))
    assert pair.outlet.is_stuck
    pair.outlet.push()
    assert not pair.writer_bell.try_wait()
    assert pair.inlet.receive() == []
    assert pair.writer_bell.try_wait()
    pair.outlet.push()
    assert not pair.outlet.is_stuck
    assert pair.inlet.receive() == [bytes(RING_BYTES)]
    assert not pair.writer_bell.try_wait()
