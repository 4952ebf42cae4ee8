"""Cost of one agreement: messages, bytes and seconds, for any number of ranks."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from hpctrain.comm.control_channel.mailbox import tree_of
from hpctrain.negotiation.messages import (
    Decision,
    NewEntry,
    Report,
    pack_bits,
    pack_decision,
    pack_report,
    pack_slots,
)
from hpctrain.negotiation.reduce_op import ReduceOp
from hpctrain.negotiation.request import Kind, Signature

_EXAMPLE = Signature(
    Kind.ALLREDUCE, (torch.float32,), ((1024, 1024),), ReduceOp.AVERAGE, 1.0, 1.0, None, ("cpu",)
)


class Rates(NamedTuple):
    """How long things take, in seconds."""

    near_s: float = 8e-6
    """A message between ranks of a node, from the end of ``send`` to the awake receiver."""
    far_s: float = 30e-6
    """A message between nodes."""
    far_byte_s: float = 1 / 1.25e9
    """Each of its bytes; those within a node cost nothing."""
    message_s: float = 5e-6
    """Python's work to send a message, or to take one."""
    new_name_s: float = 3e-6
    """Python's work on each new name in a message that is taken or made."""


_DEFAULT = Rates()


class Cost(NamedTuple):
    """Of one agreement of all ranks."""

    num_messages: int
    num_bytes: int
    seconds: float
    """From the last announcement until the last rank knows the decision."""


def known_names(nodes: Sequence[Sequence[int]], num_names: int, rates: Rates = _DEFAULT) -> Cost:
    """Return the cost of a cycle in the steady state.

    Every rank but the root sends a vector of bits up, and takes the decision from above. With the
    default rates, for 100 names at once, and the same with names that are new:

    =============  ========  =======  =======  ==========  ============
    nodes x ranks  messages  bytes    seconds  new: bytes  new: seconds
    =============  ========  =======  =======  ==========  ============
    1 x 64         126       2268     0.18 ms  0.47 MB     5.3 ms
    16 x 64        2046      36.8 kB  0.38 ms  7.7 MB      8.5 ms
    250 x 4        1998      36.0 kB  0.48 ms  7.5 MB      8.9 ms
    1000 x 1       1998      36.0 kB  0.53 ms  7.5 MB      9.3 ms
    =============  ========  =======  =======  ==========  ============

    The number of known names hardly matters: 1000 of them are 0.26 MB and take as long.

    Args:
        nodes: the ranks of each node.
        num_names: operations that have numbers, from 0; all are announced at once.
        rates: of the machine.
    """
    slots = list(range(num_names))
    up = len(pack_bits(0, (1 << num_names) - 1))
    return _cost(nodes, up, len(pack_slots(slots)), rates, 0.0)


def new_names(nodes: Sequence[Sequence[int]], num_names: int, rates: Rates = _DEFAULT) -> Cost:
    """Return the cost of a cycle with names that have no numbers yet, or other shapes than before.

    The arguments are those of ``known_names``.
    """
    names = [f"module.layers.{index:04}.weight" for index in range(num_names)]
    up = pack_report(Report(names=tuple((name, [(_EXAMPLE, None)]) for name in names)))
    entries = tuple(NewEntry(name, _EXAMPLE, None, joined=False) for name in names)
    down = pack_decision(Decision(entries, None))
    return _cost(nodes, len(up), len(down), rates, num_names * rates.new_name_s)


def _cost(
    nodes: Sequence[Sequence[int]], up: int, down: int, rates: Rates, names_s: float
) -> Cost:
    """Follow the messages along the tree; a rank takes and sends them one after the other."""
    take_s = rates.message_s + names_s
    node_of = {rank: number for number, ranks in enumerate(nodes) for rank in ranks}
    trees = [tree_of(nodes, rank) for rank in sorted(node_of)]

    def travel_s(one: int, other: int, num_bytes: int) -> float:
        is_near = node_of[one] == node_of[other]
        return rates.near_s if is_near else rates.far_s + num_bytes * rates.far_byte_s

    arrivals: list[list[float]] = [[] for _ in trees]
    clock = 0.0
    for tree in reversed(trees):  # children have higher numbers than their parents
        clock = 0.0
        for arrival in sorted(arrivals[tree.rank]):
            clock = max(clock, arrival) + take_s
        if tree.parent is not None:
            sent = clock + names_s + rates.message_s
            arrivals[tree.parent].append(sent + travel_s(tree.rank, tree.parent, up))
    known = [clock + names_s] * len(trees)
    for tree in trees:
        sent = known[tree.rank]
        for child in tree.children:
            sent += rates.message_s
            known[child] = sent + travel_s(tree.rank, child, down) + take_s
    num_edges = len(trees) - 1
    return Cost(2 * num_edges, num_edges * (up + down), max(known))
