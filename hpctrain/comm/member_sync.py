"""Synchronization of some ranks of a communicator; a rank may stop waiting and try again.

The first member receives a message from each other member, and then lets all members continue. A
member that has stopped waiting must not count as present, although its message was sent. So, after
all messages have arrived, the first member sends a query to each member, and a member answers the
query only while the member waits.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from hpctrain.comm.rail.rail import MpiWire, Transfer
    from hpctrain.comm.waiting import Watch

Members = tuple[int, ...]
_Message = list[int]
"""The attempt of the member and the attempt of the first member, each counted from 1.

The second number is 0 before the query.
"""


class MemberSync:
    """Synchronizes this rank with some other ranks of a communicator."""

    def __init__(self) -> None:
        self._num_attempts = Counter[tuple[Members, int]]()
        self._attempts: defaultdict[tuple[Members, int], dict[int, int]] = defaultdict(dict)
        """By other member: the latest attempt of that member, in which the member may still
        wait."""

    def wait_for_members(
        self, wire: "MpiWire", watch: "Watch", members: Sequence[int], tag: int
    ) -> int:
        """Wait until all ``members`` have called this method. Collective over the members.

        Args:
            wire: sends the messages.
            watch: performs all waits.
            members: the ranks, including this rank.
            tag: used by no other messages of ``wire``.

        Returns:
            How often the first member has called this method with these ``members`` and ``tag``.
            No later call with the same ``members`` and ``tag`` returns this number.

        Raises:
            RankLostError: a wait failed; the call can be repeated.
        """
        key = tuple(members), tag
        self._num_attempts[key] += 1
        by_messages = _Messages(wire, watch, tag)
        if wire.rank == members[0]:
            self._collect(by_messages, members[1:], self._attempts[key], self._num_attempts[key])
            return self._num_attempts[key]
        return self._answer_first(by_messages, members[0], self._num_attempts[key])

    def _collect(
        self, messages: "_Messages", others: Sequence[int], attempts: dict[int, int], attempt: int
    ) -> None:
        for other in others:
            if other not in attempts:
                attempts[other] = messages.receive(other)[0]
        for other in others:
            messages.send(other, [attempts[other], attempt])
        for other in others:
            while (answer := messages.receive(other)) != [attempts[other], attempt]:
                if answer[0] > attempts[other]:  # the member has stopped waiting and tried again
                    attempts[other] = answer[0]
                    messages.send(other, [attempts[other], attempt])
        for other in others:
            messages.send(other, [attempts.pop(other), attempt])

    def _answer_first(self, messages: "_Messages", first: int, attempt: int) -> int:
        messages.send(first, [attempt, 0])
        answered: _Message = []
        while True:
            message = messages.receive(first)
            if message[0] != attempt:
                continue
            if message == answered:
                return message[1]
            answered = message
            messages.send(first, answered)


class _Messages:
    """Sends and receives messages of two numbers between members."""

    def __init__(self, wire: "MpiWire", watch: "Watch", tag: int) -> None:
        self._wire, self._watch, self._tag = wire, watch, tag

    def send(self, dest: int, message: _Message) -> None:
        self._complete(self._wire.start_send(torch.tensor(message), dest, self._tag))

    def receive(self, source: int) -> _Message:
        into = torch.zeros(2, dtype=torch.int64)
        self._complete(self._wire.start_receive(into, source, self._tag))
        return [int(number) for number in into]

    def _complete(self, transfer: "Transfer") -> None:
        is_complete = partial(self._wire.is_finished, transfer)
        try:
            if not is_complete():
                self._watch.wait(is_complete)  # without a partner, since any member may be late
        finally:
            transfer.cancel()  # a message of the next attempt must not complete the transfer
