"""Votes between nodes: all nodes get the same outcome and the sum of the values."""

import random
from collections import defaultdict, deque

import pytest
import torch

from hpctrain.comm.control_channel.mailbox import NodeChannel
from hpctrain.comm.ops import Op, combination
from hpctrain.negotiation.fast_path import Ballot, NodeVotes

SUM = combination(torch.float32, Op.SUM)


class Network:
    """Messages that keep the order of each sender and are delivered on request."""

    def __init__(self, rank, networks):
        self.votes, self.has_new_votes = defaultdict(deque), False
        self._rank, self._networks = rank, networks
        self.coming = deque()

    def send(self, to, message, *, is_vote):
        assert is_vote
        self._networks[to].coming.append((self._rank, message))

    def read_votes(self):
        self.has_new_votes = False

    def look(self):
        while self.coming:
            source, message = self.coming.popleft()
            self.votes[source].append(message)
            self.has_new_votes = True
        return self.has_new_votes


def nodes_of(size):
    networks = []
    networks += [Network(rank, networks) for rank in range(size)]
    channels = [
        NodeChannel(None, None, (), None, None, network, rank, range(size))
        for rank, network in enumerate(networks)
    ]
    return [NodeVotes(channel) for channel in channels]


def outcomes(nodes, order, given):
    """Let nodes vote; return the outcome of each node.

    ``given`` has, for each node, a number and values, or None if the node refuses."""
    found = [None] * len(nodes)
    while None in found:
        rank = order.randrange(len(nodes))
        node, vote = nodes[rank], given[rank]
        if found[rank] is not None:
            continue
        if vote is None:
            was_open = node.is_open
            node._network.look()
            node.continue_refused(refuse=True)
            if (was_open or node.num_bytes_sent) and not node.is_open:
                found[rank] = False
        elif not node.is_open:
            node.start(vote[0], Ballot(vote[1], SUM))
        else:
            found[rank] = node.outcome()
    for node in nodes:
        node.num_bytes_sent = 0
        assert not any(node._inboxes)
    return found


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6, 7, 8, 13])
def test_all_nodes_get_the_same_outcome_and_sum(size):
    nodes, order = nodes_of(size), random.Random(size)
    for turn in range(200):
        kind = order.choice(("all", "all", "one refuses", "some refuse", "another"))
        values = [torch.randint(-9, 9, (1 + turn % 5,)).float() for _ in nodes]
        total = sum(values)
        given = [(turn, each.clone()) for each in values]
        if kind == "another":
            given[order.randrange(size)] = (turn + 1, values[0].clone())
        refuses = {"one refuses": 1, "some refuse": order.randrange(1, size)}.get(kind, 0)
        for rank in order.sample(range(size), refuses):
            given[rank] = None
        assert outcomes(nodes, order, given) == [kind == "all"] * size
        if kind == "all":
            assert all(torch.equal(sums, total) for _, sums in given)


def test_a_refusing_node_waits_until_another_node_votes():
    first, second = nodes_of(2)
    first.continue_refused(refuse=True)
    assert not first.is_open
    second.start(3)
    first._network.look()
    first.continue_refused(refuse=False)
    assert not first.is_open
    first.continue_refused(refuse=True)
    assert second.outcome() is False
