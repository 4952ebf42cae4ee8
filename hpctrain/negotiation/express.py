"""Express: repeated operations, agreed on by a word of each rank instead of mail.

A rank that has nothing else under way prepares an operation that all ranks know by its number
(``TwoPhaseCommit``); once rank 0 has committed it, all carry it out. The commonest, a reduction of
one tensor, is over then but for the sum: each rank has written its values into its slot of node
memory before. What rank 0 aborts is announced by mail, the ordinary way, as is everything while a
rank waits for something by mail; rank 0 takes part in both, so all has one order.

Between nodes a small tensor's sum over the node travels with the node's vote. It is what the plan
would have it be, to the bit, so the result does not depend on the way.
"""

import ctypes
import time
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import Tensor

from hpctrain.comm.control_channel.votes import ALGORITHM, Ballot
from hpctrain.comm.node.segments import yield_core
from hpctrain.comm.node.shared_memory import combine_to
from hpctrain.comm.observed import ObservedCommunicator
from hpctrain.comm.ops import Combination, combination
from hpctrain.core.units import KIB
from hpctrain.negotiation.messages import Entry
from hpctrain.negotiation.reducing import recipe
from hpctrain.negotiation.request import Handle, Kind, ReduceOp, Result, Signature

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.control_channel.commit import TwoPhaseCommit
    from hpctrain.comm.control_channel.mailbox import Mailbox
    from hpctrain.comm.hierarchical import HierarchicalCommunicator
    from hpctrain.negotiation.pending_table import ResponseCache

_MOST_KNOWN = 4096  # operations that are kept, with their views of the slots
_NUM_LOOKS = 20  # at least, before a rank that shares its core sleeps
_MOVE_BYTES = 4 * KIB
"""Up to so many are moved as bytes: torch takes half a microsecond more to find its way."""
_PLAIN = Tensor, torch.nn.Parameter  # what has its values where ``data_ptr`` says
_VOTE_BYTES = 128 * KIB
"""Up to so many, of all its ranks, a node's sum is made by its first rank and travels with its
vote: larger messages wait for each other on slow links."""


class Known(NamedTuple):
    """A repeated operation, the same on all ranks."""

    entry: Entry  # what all ranks know it as
    signature: Signature  # the same as in requests of this rank
    number: int
    slots: tuple[tuple[Tensor, ...], ...] = ()
    """By turn and rank, in the shape of the tensor, of a reduction that is only a sum; else none,
    and a commit means that all ranks begin."""
    combination: Combination | None = None
    scale: float | None = None
    num_bytes: int = 0
    own: tuple[int, ...] = ()  # where this rank's slots are, by turn, if few bytes go there


class Express:
    """This rank's part; used by the thread that drives."""

    def __init__(
        self,
        comm: "Communicator",
        commit: "TwoPhaseCommit",
        post: "Mailbox",
        cache: "ResponseCache",
    ) -> None:
        """Take a communicator of one node, its mailboxes, and the numbers of operations."""
        self.commit = commit
        # A listener gets all that moves by the methods of the communicator.
        self._is_heard = isinstance(comm, ObservedCommunicator)
        self._comm, self._post, self._cache = cast("HierarchicalCommunicator", comm), post, cache
        self._node = self._comm.node
        self._num_nodes = post.tree.num_nodes
        self._ranks_per_node = comm.size / self._num_nodes
        self._known: dict[str, Known] = {}

    def known(self, name: str, signature: Signature) -> Known | None:
        """Return what all ranks know of an operation of this name; None if it is new."""
        known = self._known.get(name)
        if (
            known is not None
            and known.signature is signature
            and known.entry is self._cache.entries[known.number]
        ):
            return known
        number = self._cache.number(name, signature)
        if number is None:
            return None
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        entry = self._cache.entries[number]
        known = self._known[name] = self._reduction(Known(entry, signature, number))
        return known

    def prepare(self, known: Known, handle: Handle) -> None:
        """Prepare an operation; then nothing else until ``commit.look`` knows more."""
        if known.slots:
            tensor, turn = handle.tensor, self._node.turn
            if (
                known.own
                and tensor.__class__ in _PLAIN
                and tensor.is_contiguous()
                and not tensor.is_neg()
            ):
                ctypes.memmove(known.own[turn], tensor.data_ptr(), known.num_bytes)
            else:
                known.slots[turn][self._node.local_rank].copy_(tensor.detach())
            if self.commit.votes is not None:
                self.commit.prepare(known.number, partial(self._ballot, known))
                return
        self.commit.prepare(known.number)

    def look_awake(self) -> bool | None:
        """Say what ``commit.look`` says, within the moment that a rank stays awake."""
        look = self.commit.look
        for _ in range(_NUM_LOOKS):
            if (verdict := look()) is not None:
                return verdict
        pace, start = self._post.pace, time.perf_counter()
        while (waited_s := time.perf_counter() - start) < pace.spin_s + pace.yield_s:
            if waited_s > pace.spin_s and not self.commit.has_voted:
                yield_core()  # else a look is one of MPI, which yields where it should
            if (verdict := look()) is not None:
                return verdict
        return None

    def reduced(self, known: Known, handle: Handle) -> Result:
        """Return the sum of what all ranks have prepared and rank 0 has committed."""
        node, tensor, what = self._node, handle.tensor, known.combination
        parts = list(known.slots[node.turn])
        node.end_turn()
        node.count((1 + len(parts)) * known.num_bytes)
        given = tensor.detach() if tensor.requires_grad else tensor
        if self._num_nodes > 1:
            del parts[1:]  # the first is the sum
            self._count_votes()
        elif node.local_rank < 2:
            parts[node.local_rank] = given  # one stream less than from the slot
        result, is_in_place = given, handle.is_in_place
        if not is_in_place:
            result = torch.empty_like(given, memory_format=torch.contiguous_format)
        assert what is not None
        combine_to(result, parts, what, known.scale)
        return (tensor if is_in_place else result,)

    def _count_votes(self) -> None:
        votes, rail = self.commit.votes, self._comm.internode
        if votes is not None and rail is not None:
            rail.wire.count(votes.taken_bytes())

    def _ballot(self, known: Known) -> Ballot:
        """Sum over the node, into the first rank's slot."""
        parts = known.slots[self._node.turn]
        assert known.combination is not None
        combine_to(parts[0], parts, known.combination, None)
        return Ballot(parts[0].view(-1), known.combination)

    def _reduction(self, known: Known) -> Known:
        """Add what a reduction takes that is only a sum, of what fits a slot."""
        kind, dtypes, shapes, op, prescale, postscale, _, _ = known.signature
        if kind is not Kind.ALLREDUCE or op is None or op is ReduceOp.ADASUM or len(dtypes) > 1:
            return known
        dtype, shape, slots = dtypes[0], torch.Size(shapes[0]), self._comm.slots
        how = recipe(dtype, op, prescale, postscale, self._comm.size)
        what = combination(dtype, how.op)
        is_simple = how.is_plain and what.lane is dtype and not dtype.is_complex
        num_bytes = shape.numel() * dtype.itemsize
        is_direct = self._is_direct(num_bytes, what)
        if self._is_heard or not (is_simple and is_direct) or shape.numel() > slots.numel(dtype):
            return known
        views = tuple(slots.views(dtype, shape, turn) for turn in (0, 1))
        known = known._replace(slots=views, combination=what, scale=how.scale, num_bytes=num_bytes)
        if num_bytes > _MOVE_BYTES:
            return known
        rank = self._node.local_rank
        return known._replace(own=tuple(of_turn[rank].data_ptr() for of_turn in views))

    def _is_direct(self, num_bytes: int, what: Combination) -> bool:
        """Say whether the plan sums so many bytes in the order in which it is done here."""
        plan = self._comm.plan
        way = plan.tensors.at(num_bytes)
        if self._num_nodes == 1:
            return way == "direct"
        over_rail = {name for start, name in plan.rail.steps if start <= num_bytes}
        same_bits = what.wide is what.lane and (self._num_nodes == 2 or over_rail == {ALGORITHM})
        fits = 0 < num_bytes * self._ranks_per_node <= _VOTE_BYTES
        return way == "levels" and same_bits and fits
