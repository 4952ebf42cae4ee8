"""Fast path: agreement on repeated operations in node memory, without control messages.

Each rank has a word in node memory. A rank without other operations in flight prepares a repeated
operation, which all ranks know by a number: the rank writes its data, then the number to its word.
If all words are equal, rank 0 of the node commits the operation by writing its own word. If not,
rank 0 aborts the operation by overwriting the other words. A commit takes one write per rank, and
no rank waits for another afterwards. The most frequent operation is a reduction of one tensor:
each rank has written its values to its slot before the commit, so only the sum has to be computed.
An aborted operation is announced by control messages, as are all operations while a rank waits for
the answer to a control message. Rank 0 takes part in commits and in control messages, so all
operations have one order.

On several nodes, the first ranks of the nodes vote by an all-reduce of small messages. A message
contains the number of the prepared operation and partial sums. A rank that receives another
number, or a refusal, sends refusals from then on, so all nodes get the same outcome after the
rounds of one all-reduce. A vote cannot be withdrawn. Values are added in the same order as without
the fast path, so the results are identical.

States of a rank (``PathState``)::

    state      event                                        next state   verdict
    IDLE       prepare(number)                              PREPARED
    IDLE       set_busy(True), waits for control messages   BUSY
    BUSY       set_busy(False), has the answer              IDLE
    BUSY       prepare(number)                              PREPARED
    PREPARED   rank 0 stores a larger number of commits     IDLE         committed
    PREPARED   rank 0 stores ABORTED in this rank's word    IDLE         aborted

    on rank 0 of a node
    PREPARED   all words are equal, and there is one node   IDLE         committed, stores it
    PREPARED   all words are equal, on several nodes        VOTING
    PREPARED   a rank is busy, or its number differs        IDLE         aborted
    PREPARED   withdraw()                                   IDLE
    VOTING     all nodes voted for the same number          IDLE         committed, stores it
    VOTING     a node refused                               IDLE         aborted, stores ABORTED
    not VOTING set_busy(True)                               BUSY         aborted, stores ABORTED,
                                                                         refuses other nodes' vote

Source: Gray 1978, "Notes on data base operating systems", for two-phase commit. Differs: there is
no log, because waiting ranks detect dead ranks.
"""

import ctypes
import enum
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from hpctrain.comm.control_channel.mailbox import WORDS, NodeChannel
from hpctrain.comm.node.kernel import DONE, LATE
from hpctrain.comm.node.segments import yield_core
from hpctrain.comm.observed import ObservedCommunicator
from hpctrain.comm.ops import Combination, Op, combination, combine_to
from hpctrain.comm.rail.algorithms import allreduce_steps
from hpctrain.comm.rail.wire import Wire
from hpctrain.core.torch_compat import increment_version
from hpctrain.core.units import KIB
from hpctrain.negotiation.messages import Entry
from hpctrain.negotiation.reducing import recipe_of
from hpctrain.negotiation.request import Handle, Kind, ReduceOp, Result, Signature

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.control_channel.mailbox import Mailbox
    from hpctrain.comm.node.kernel import Sum
    from hpctrain.comm.plan.plan import Plan
    from hpctrain.negotiation.pending_table import ResponseCache

_NUMBER_BITS = 20
_NOTHING, _WAITS, _ABORTED = 0, -1, -2  # words of ranks that have prepared nothing

_VOTE_ALGORITHM = "doubling"
"""Its number of messages does not depend on the size, which a refusing node does not know."""
_REFUSED = -1
_CALL, _NUMBER_BYTES = b"", 8  # _CALL is sent by a node that receives before it sends

_MAX_KNOWN = 4096  # cached operations, with their views of the slots
_NUM_POLLS = 20  # minimum number of polls before a rank that shares its core sleeps
_VOTE_BYTES = 128 * KIB
"""Maximum bytes of values for a vote, over all ranks of a node: larger messages delay each other
on slow links."""


class Ballot(NamedTuple):
    """Flat, contiguous values of a node that a vote combines with the values of other nodes."""

    values: Tensor
    how: Combination


_BLANK = Ballot(torch.zeros(1), combination(torch.float32, Op.SUM))  # for a vote without values


class NodeVotes(Wire):
    """Sends and receives the votes of a node, on its first rank. Not thread-safe.

    Args:
        channel: channel of the node, with a network to the first ranks of the other nodes.
    """

    def __init__(self, channel: NodeChannel) -> None:
        assert channel.network is not None
        self._network, self._leaders = channel.network, channel.leaders
        self.rank, self.size = channel.leaders.index(channel.rank), len(channel.leaders)
        self.num_bytes_sent = 0
        self._count = channel.count_sent
        self._inboxes = [self._network.votes[leader] for leader in self._leaders]
        self._number = _REFUSED
        self._steps: Iterator[Any] = iter(())
        self._awaited: Any = None
        self.is_open = False  # this node has voted, and the outcome is not known

    def start(self, number: int, ballot: Ballot = _BLANK) -> None:
        """Start a vote for operation ``number``, which also combines the ballots of all nodes."""
        self.is_open, self._number = True, number
        self._steps, sent = allreduce_steps(_VOTE_ALGORITHM, self, *ballot), self.num_bytes_sent
        self._awaited = next(self._steps, None)
        if self.num_bytes_sent == sent:  # this node receives first: announce the vote
            self._network.send(self._leaders[self._awaited[1]], _CALL, is_vote=True)

    def outcome(self) -> bool | None:
        """Return whether all nodes voted for the same number; None while votes are missing."""
        self._network.look()
        self._network.read_votes()
        while self._awaited is not None:
            if not self.is_finished(self._awaited):
                return None
            self._awaited = next(self._steps, None)
        self.is_open = False
        return self._number != _REFUSED

    def continue_refused(self, *, refuse: bool) -> None:
        """Advance a refused vote; if ``refuse``, also refuse a vote that other nodes started."""
        self._network.read_votes()
        if refuse and not self.is_open and any(self._inboxes):
            self.start(_REFUSED)
        if self.is_open:
            self.outcome()

    @override
    def start_send(self, tensor: Tensor, dest: int, tag: int = 0) -> None:
        """Send the number of the vote; also send ``tensor``, unless the vote is a refusal."""
        message = self._number.to_bytes(_NUMBER_BYTES, "little", signed=True)
        if self._number != _REFUSED:
            message += ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        self.num_bytes_sent += len(message)
        self._count(len(message))
        self._network.send(self._leaders[dest], message, is_vote=True)

    @override
    def start_receive(self, tensor: Tensor, source: int, tag: int = 0) -> tuple[Tensor, int]:
        """Return a transfer for the next vote of ``source``."""
        return tensor, source

    def finish(self, transfer: tuple[Tensor, int]) -> None:
        """Raise ``NotImplementedError``, since votes are only polled."""
        raise NotImplementedError

    def is_finished(self, transfer: tuple[Tensor, int]) -> bool:
        """Process the next vote of the source; return False if the vote has not arrived."""
        tensor, source = transfer
        inbox, message = self._inboxes[source], _CALL
        while message is _CALL:
            if not inbox:
                return False
            message = inbox.popleft() or _CALL
        number = int.from_bytes(message[:_NUMBER_BYTES], "little", signed=True)
        if number != self._number or len(message) != _NUMBER_BYTES + tensor.nbytes:
            self._number = _REFUSED
        else:
            ctypes.memmove(tensor.data_ptr(), message[_NUMBER_BYTES:], tensor.nbytes)
        return True


class PathState(enum.Enum):
    """State of a rank on the fast path; see the module docstring."""

    IDLE = enum.auto()
    BUSY = enum.auto()
    PREPARED = enum.auto()
    VOTING = enum.auto()


_IDLE, _BUSY, _PREPARED, _VOTING = PathState  # a lookup in an Enum takes 50 ns


class NodeCommit:
    """Commits or aborts prepared operations with the other ranks of the node.

    Not thread-safe. Each rank has one word in node memory. A rank other than 0 stores in its word
    the number of its prepared operation and the number of commits so far, which is the same on all
    ranks, so an old word has no effect. Rank 0 overwrites the words of the other ranks to abort;
    its own word is the number of commits.

    Args:
        channel: words, doorbells and tree of the node.
    """

    def __init__(self, channel: NodeChannel) -> None:
        self.state = _IDLE
        self.num_commits = 0
        self._words, self._fence, self._doorbells = channel.words, channel.fence, channel.doorbells
        self._ring_root = channel.doorbells[0]
        self._ring_below = [channel.doorbells[child] for child in channel.tree.children]
        self._is_child_of_root = channel.tree.parent == 0
        self._votes = NodeVotes(channel) if channel.leaders else None
        self._ballot: Callable[[], Ballot] | None = None
        self._is_root = channel.tree.parent is None
        self._place = WORDS * channel.tree.rank
        self._others = channel.words[WORDS::WORDS]  # read in one copy, about 30 ns per rank
        self._num_others = len(self._others)
        self._word = _NOTHING

    def prepare(self, number: int, ballot: Callable[[], Ballot] | None = None) -> None:
        """Publish that this rank is ready for an operation and has written its data. Local.

        Until ``poll`` returns a verdict, this rank must not start any collective operation.

        Args:
            number: number of the operation.
            ballot: function that returns the values of the node's vote; rank 0 of the node calls
                the function once all ranks of the node are ready.
        """
        self._ballot, self.state = ballot, _PREPARED
        self._word = word = self.num_commits << _NUMBER_BITS | number + 1
        if not self._is_root:
            if self._fence is not None:
                self._fence()  # complete stores and loads of data before the store of the word
            self._words[self._place] = word
            self._ring_root()

    def record(self, code: int, word: int) -> bool:
        """Record the kernel's result ``code`` for ``word``; return True if it is a commit."""
        if code == DONE:
            self.num_commits += 1
        elif code == LATE:
            self._word, self._ballot, self.state = word, None, _PREPARED
        return code == DONE

    def poll(self) -> bool | None:
        """Return True if the prepared operation is committed, False if aborted, else None.

        After a commit, the data of all ranks are valid until a rank prepares the operation after
        the next one.
        """
        if self.state is not _PREPARED:
            return self._outcome() if self.state is _VOTING else False
        if self._is_root:
            return self._poll_words()
        if self._words[0] != self.num_commits:
            self._count_commit()
            return True
        return None if self._words[self._place] == self._word else self._aborted()

    def withdraw(self) -> bool:
        """Withdraw the prepared operation; return False unless this is rank 0 and no vote runs."""
        if not self._is_root or self.state is not _PREPARED:
            return False
        self.state = _IDLE
        return True

    def set_busy(self, *, busy: bool) -> None:
        """Publish whether this rank waits for control messages; waiting prevents commits. Local.

        The caller must call this method before a control message is sent, before other ranks can
        receive the answer, and whenever rank 0 was woken while busy, so that rank 0 aborts the
        operations that other ranks have prepared.
        """
        was_busy = self.state is _BUSY
        if not (busy or was_busy) and self._votes is None:
            return
        if (busy or was_busy) and self.state is not _VOTING:  # a vote is not withdrawn
            self.state = _BUSY if busy else _IDLE
        if self._is_root:
            if busy:
                self._abort()
            if self._votes is not None and self.state is not _VOTING:
                self._votes.continue_refused(refuse=busy)
        elif busy is not was_busy:
            self._words[self._place] = _WAITS if busy else _NOTHING
            if busy and not self._is_child_of_root:  # a child sends its control message to rank 0
                self._ring_root()

    def _poll_words(self) -> bool | None:
        others = self._others.tolist()
        if others.count(self._word) == self._num_others:
            if self._fence is not None:
                self._fence()  # load the words before the data
            return self._commit() if self._votes is None else self._vote(self._votes)
        first = self.num_commits << _NUMBER_BITS
        for word in others:
            if word < 0 or (word >= first and word not in (_NOTHING, self._word)):
                return self._aborted()
        return None

    def _vote(self, votes: NodeVotes) -> bool | None:
        """Start a vote, unless an earlier vote that this node refused is still in flight."""
        if votes.is_open and votes.outcome() is None:
            return None
        self.state = _VOTING
        number = (self._word & (1 << _NUMBER_BITS) - 1) - 1
        votes.start(number, self._ballot() if self._ballot is not None else _BLANK)
        return self._outcome()

    def _outcome(self) -> bool | None:
        assert self._votes is not None
        verdict = self._votes.outcome()
        if verdict:
            return self._commit()
        if verdict is False:
            self._aborted()
            self._abort()
        return verdict

    def _commit(self) -> bool:
        if self._fence is not None:
            self._fence()
        self._words[0] = self.num_commits + 1
        self._count_commit()
        return True

    def _abort(self) -> None:
        first = max(self.num_commits << _NUMBER_BITS, 1)
        for rank, word in enumerate(self._others.tolist(), 1):
            if word >= first:
                self._words[WORDS * rank] = _ABORTED
                self._doorbells[rank]()

    def _aborted(self) -> bool:
        self.state = _IDLE
        return False

    def _count_commit(self) -> None:
        self.state = _IDLE
        self.num_commits += 1
        if self._fence is not None:
            self._fence()
        for ring in self._ring_below:
            ring()


class Known(NamedTuple):
    """A repeated operation, with a number that is the same on all ranks."""

    entry: Entry  # entry of the operation in the cache
    signature: Signature  # the same object as in requests of this rank
    number: int
    slots: tuple[tuple[Tensor, ...], ...] = ()
    """Views of the slots in the shape of the tensor, by turn (0 or 1) and rank, for a plain sum of
    one tensor. Otherwise empty: all ranks execute the operation after the commit."""
    how: Combination | None = None
    scale: float | None = None
    num_bytes: int = 0
    reduce: "Sum | None" = None  # the reduction by the kernel


class FastPath:
    """Prepares and completes operations on the fast path.

    Only the thread that drives the engine uses this object.

    Args:
        comm: communicator whose ranks share node memory.
        post: mailboxes of ``comm``, with a ``channel``.
        cache: assigns numbers to operations.
    """

    def __init__(self, comm: "Communicator", post: "Mailbox", cache: "ResponseCache") -> None:
        assert post.channel is not None
        assert comm.node is not None
        self.commit = NodeCommit(post.channel)
        # Listeners are called by methods of the communicator, so sums must use these methods.
        self._is_observed = isinstance(comm, ObservedCommunicator)
        self._size, self._node, self._pace, self._cache = comm.size, comm.node, post.pace, cache
        self._plan: Plan = post.channel.plan
        self._kernel = post.channel.kernel
        self._num_nodes = post.tree.num_nodes
        self._known: dict[str, Known] = {}

    def known(self, name: str, signature: Signature) -> Known | None:
        """Return the operation of this name and signature; None unless it has a number."""
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
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        entry = self._cache.entries[number]
        known = self._known[name] = self._reduction(Known(entry, signature, number))
        return known

    def reduce_now(self, known: Known, tensor: Tensor) -> bool | None:
        """Reduce a plain contiguous tensor in place; return True if committed, None if undecided.

        Returns False if aborted, or if the kernel is off or does not support the operation.
        """
        if known.reduce is None:
            return False
        try:
            address = tensor.data_ptr()
        except RuntimeError:  # a wrapper of torch.func, without memory
            return False
        commit, node = self.commit, self._node
        word = commit.num_commits << _NUMBER_BITS | known.number + 1
        code = known.reduce(word, node.turn, address)
        if commit.record(code, word):
            node.switch_slots((1 + self._size) * known.num_bytes)
            increment_version((tensor,))
        return None if code == LATE else code == DONE

    def prepare(self, known: Known, handle: Handle) -> None:
        """Write the values of an operation, and prepare it.

        The caller must not prepare another operation until ``commit.poll`` returns a bool.
        """
        if not known.slots:
            self.commit.prepare(known.number)
            return
        known.slots[self._node.turn][self._node.local_rank].copy_(handle.tensor.detach())
        ballot = partial(self._ballot, known) if self._num_nodes > 1 else None
        self.commit.prepare(known.number, ballot)

    def poll_spinning(self) -> bool | None:
        """Poll while this rank may spin or yield; return the last result of ``commit.poll``."""
        poll, pace = self.commit.poll, self._pace
        for _ in range(_NUM_POLLS):
            if (verdict := poll()) is not None:
                return verdict
        start = time.perf_counter()
        while (waited_s := time.perf_counter() - start) < pace.spin_s + pace.yield_s:
            if waited_s > pace.spin_s and self.commit.state is not _VOTING:
                yield_core()  # during a vote MPI yields the core
            if (verdict := poll()) is not None:
                return verdict
        return None

    def reduced(self, known: Known, handle: Handle) -> Result:
        """Return the result of a committed reduction: the sum of the values of all ranks."""
        node, tensor, how = self._node, handle.tensor, known.how
        parts = list(known.slots[node.turn])
        node.switch_slots((1 + len(parts)) * known.num_bytes)
        given = tensor.detach() if tensor.requires_grad else tensor
        if self._num_nodes > 1:
            del parts[1:]  # the first part is the sum
        elif node.local_rank < 2:
            parts[node.local_rank] = given  # instead of its copy: one memory stream less
        result, is_in_place = given, handle.is_in_place
        if not is_in_place:
            result = torch.empty_like(given, memory_format=torch.contiguous_format)
        assert how is not None
        combine_to(result, parts, how, known.scale)
        return (tensor if is_in_place else result,)

    def _ballot(self, known: Known) -> Ballot:
        """Sum the values of the node in the slot of its first rank; return the sum as a ballot."""
        parts = known.slots[self._node.turn]
        assert known.how is not None
        combine_to(parts[0], parts, known.how, None)
        return Ballot(parts[0].view(-1), known.how)

    def _reduction(self, known: Known) -> Known:
        """Return ``known``, with slots if the operation is a plain sum that fits a slot."""
        kind, dtypes, shapes, op, *_ = known.signature
        if kind is not Kind.ALLREDUCE or op is None or op is ReduceOp.ADASUM or len(dtypes) > 1:
            return known
        dtype, shape, slots = dtypes[0], torch.Size(shapes[0]), self._node.slots
        what = recipe_of(known.signature, self._size)
        how = combination(dtype, what.op)
        is_simple = what.is_plain and how.storage_dtype is dtype and not dtype.is_complex
        num_bytes = shape.numel() * dtype.itemsize
        fits = shape.numel() <= slots.numel(dtype) and self._is_direct(num_bytes, how)
        if self._is_observed or not (is_simple and fits):
            return known
        views = tuple(slots.views(dtype, shape, turn) for turn in (0, 1))
        reduce = None
        if self._kernel is not None and how.kernel_number >= 0:
            reduce = self._kernel.commit_of(how.kernel_number, shape.numel(), what.scale)
        return Known(*known[:3], views, how, what.scale, num_bytes, reduce)

    def _is_direct(self, num_bytes: int, how: Combination) -> bool:
        """Return True if the plan adds values of this size in the same order as the fast path."""
        path = self._plan.tensors.at(num_bytes)
        if self._num_nodes == 1:
            return path == "direct"
        over_rail = {name for start, name in self._plan.rail.steps if start <= num_bytes}
        same_order = self._num_nodes == 2 or over_rail == {_VOTE_ALGORITHM}
        fits = 0 < num_bytes * self._size / self._num_nodes <= _VOTE_BYTES
        same_bits = same_order and how.accumulate_dtype is how.storage_dtype
        return path == "levels" and same_bits and fits
