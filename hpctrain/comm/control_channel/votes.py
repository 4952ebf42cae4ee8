"""Votes of nodes on what each is prepared for, with values that are reduced on the way.

A vote is an all-reduce of small messages between the first ranks of nodes: each carries the number
of what its sender is prepared for, and partial sums. Whoever hears of another number, or of a
refusal, passes on a refusal; so all come to the same outcome, in as many rounds as a sum takes.
No vote can be taken back. Each node takes part in every vote, so they need no numbers.
"""

import ctypes
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm.ops import Combination, Op, combination
from hpctrain.comm.rail.algorithms import allreduce_steps
from hpctrain.comm.rail.wire import Wire

if TYPE_CHECKING:
    from hpctrain.comm.control_channel.message_network import Network

ALGORITHM = "doubling"
"""Its messages are as many for any size: who refuses does not know what others vote on."""
_REFUSED = -1
_CALL = b""  # of a node that hears of others before it votes
_NUMBER_BYTES = 8


class Ballot(NamedTuple):
    """Values of a node to be combined with those of all others; flat and contiguous."""

    values: Tensor
    how: Combination


_BLANK = Ballot(torch.zeros(1), combination(torch.float32, Op.SUM))  # of a vote without values


class Votes(Wire):
    """The part of one node, for its first rank; one thread at a time."""

    def __init__(self, network: "Network", leaders: Sequence[int], rank: int) -> None:
        """Take the first ranks of all nodes, ``rank`` among them, and messages between them."""
        self.rank, self.size = leaders.index(rank), len(leaders)
        self.num_bytes_sent = 0  # so far
        self._network, self._leaders = network, leaders
        self._inboxes = [network.votes[leader] for leader in leaders]
        self._number = _REFUSED
        self._steps: Iterator[Any] = iter(())
        self._awaited: Any = None
        self.is_open = False
        """Whether this node has voted, and does not know the outcome yet."""

    def begin(self, number: int, ballot: Ballot = _BLANK) -> None:
        """Vote for ``number``; its values are combined with those of all nodes, in place."""
        self.is_open, self._number = True, number
        self._steps, sent = allreduce_steps(ALGORITHM, self, *ballot), self.num_bytes_sent
        self._awaited = next(self._steps, None)
        if self.num_bytes_sent == sent:  # the other end waits for nobody, and could not know
            self._network.send(self._leaders[self._awaited[1]], _CALL, is_vote=True)

    def outcome(self) -> bool | None:
        """Say whether all nodes have voted for the same number; None until that is known."""
        self._network.look()
        self._network.has_new_votes = False
        while self._awaited is not None:
            if not self.is_finished(self._awaited):
                return None
            self._awaited = next(self._steps, None)
        self.is_open = False
        return self._number != _REFUSED

    def look(self, *, refuse: bool) -> None:
        """Go on with a vote that was refused; ``refuse`` one that others have begun, if any."""
        self._network.has_new_votes = False
        if refuse and not self.is_open and any(self._inboxes):
            self.begin(_REFUSED)
        if self.is_open:
            self.outcome()

    def taken_bytes(self) -> int:
        """Return the bytes sent since the last call."""
        taken, self.num_bytes_sent = self.num_bytes_sent, 0
        return taken

    def start_send(self, tensor: Tensor, dest: int, tag: int = 0) -> None:  # noqa: ARG002
        """Send the number and, unless that is a refusal, ``tensor``."""
        message = self._number.to_bytes(_NUMBER_BYTES, "little", signed=True)
        if self._number != _REFUSED:
            message += ctypes.string_at(tensor.data_ptr(), tensor.nbytes)
        self.num_bytes_sent += len(message)
        self._network.send(self._leaders[dest], message, is_vote=True)

    def start_receive(self, tensor: Tensor, source: int, tag: int = 0) -> tuple[Tensor, int]:  # noqa: ARG002
        """Say what is to come: the next vote of ``source``."""
        return tensor, source

    def finish(self, transfer: tuple[Tensor, int]) -> None:
        """Nobody waits here."""
        raise NotImplementedError

    def is_finished(self, transfer: tuple[Tensor, int]) -> bool:
        """Take a message, if it has come."""
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
