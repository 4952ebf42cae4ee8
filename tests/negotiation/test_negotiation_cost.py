"""The cost of an agreement as it is computed, and as it is."""

import pytest
import torch

from hpctrain.comm.control_channel.mailbox import tree_of
from hpctrain.negotiation.cost import Rates, known_names, new_names
from hpctrain.negotiation.reduce_op import ReduceOp
from hpctrain.negotiation.request import Kind, Signature
from tests.negotiation.negotiating import Ranks

SIGNATURE = Signature(
    Kind.ALLREDUCE, (torch.float32,), ((1024, 1024),), ReduceOp.AVERAGE, 1.0, 1.0, None, ("cpu",)
)


def grid(num_nodes: int, per_node: int) -> list[range]:
    return [range(node * per_node, (node + 1) * per_node) for node in range(num_nodes)]


def cycle(ranks: Ranks, num_names: int, start: int = 0) -> tuple[int, int]:
    """Return messages and bytes of one agreement."""
    ranks.messages.clear()
    for negotiator in ranks.negotiators:
        for index in range(start, start + num_names):
            negotiator.announce(f"module.layers.{index:04}.weight", SIGNATURE)
    ranks.settle()
    return len(ranks.messages), sum(len(message) for *_, message in ranks.messages)


@pytest.mark.parametrize("nodes", [grid(1, 1), grid(1, 7), grid(12, 3), [[0, 3, 4], [1], [2, 5]]])
@pytest.mark.parametrize("num_names", [1, 40])
def test_messages_and_bytes_are_those_of_the_negotiators(nodes, num_names):
    size = sum(map(len, nodes))
    ranks = Ranks([tree_of(nodes, rank) for rank in range(size)])
    cycle(ranks, num_names)  # the first time, ranks also say who is below them
    assert cycle(ranks, num_names) == known_names(nodes, num_names)[:2]
    again = Ranks([tree_of(nodes, rank) for rank in range(size)], num_slots=num_names)
    cycle(again, num_names, start=num_names)
    assert cycle(again, num_names) == new_names(nodes, num_names)[:2]


def test_two_ranks_take_one_way_up_and_one_down():
    rates = Rates(near_s=1.0, far_s=100.0, far_byte_s=2.0, message_s=10.0, new_name_s=0.0)
    assert known_names(grid(1, 2), 1, rates).seconds == 2 * (1.0 + 2 * 10.0)
    cost = known_names(grid(2, 1), 1, rates)
    assert cost.seconds == 2 * (100.0 + 2 * 10.0) + 2.0 * cost.num_bytes
    assert known_names(grid(1, 1), 1, rates).seconds == 0.0


def test_a_thousand_ranks_agree_in_half_a_millisecond():
    for nodes in (grid(16, 64), grid(250, 4)):
        cost = known_names(nodes, 100)
        assert cost.num_messages == 2 * (sum(map(len, nodes)) - 1)
        assert 35e3 <= cost.num_bytes <= 37e3
        assert 0.3e-3 < cost.seconds < 0.5e-3
        assert 8e-3 < new_names(nodes, 100).seconds < 9e-3
