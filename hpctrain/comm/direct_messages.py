"""Messages with tensors between any two ranks, such as a server and a client.

The messages use two-sided MPI: in Open MPI and MPICH, one-sided operations make progress only
inside MPI calls of the target, so a target that computes would need a thread as well.
"""

import contextlib
import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm import requests
from hpctrain.comm.mpi_start import MPI, is_loss
from hpctrain.comm.node.segments import Fence, Semaphore
from hpctrain.comm.owner import Owner
from hpctrain.comm.rail.rail import bytes_of
from hpctrain.comm.request_thread import Polled, RequestThread
from hpctrain.comm.requests import MpiRequest
from hpctrain.comm.waiting import BY_MPI, Watch, wait_until
from hpctrain.comm.watched_calls import WatchedCalls
from hpctrain.core.errors import RankLostError
from hpctrain.core.pickles import unpickled

_REPLY_PACE = BY_MPI._replace(yield_s=200e-6, shortest_s=50e-6, longest_s=1e-3)
"""Pace of waits for the reply of a server, whose thread sleeps between requests."""


class Message(NamedTuple):
    """A received message."""

    source: int  # rank of the sender
    content: Any  # the unpickled object
    tensors: Sequence[Tensor]


@dataclass(eq=False)
class _Arriving:
    source: int
    request: MpiRequest | None  # receives the content
    packed: bytearray
    content: Any = None
    tensors: list[Tensor] = field(default_factory=list)
    parts: list[MpiRequest] = field(default_factory=list)


class Channel:
    """Sends and receives messages with one tag, between any two ranks of a communicator.

    On each rank one thread sends and one thread receives.

    Args:
        comm: the ranks. No other code may use ``tag`` and ``tag + 1`` of this communicator.
        tag: tag of the messages; tensors have the tag ``tag + 1``.
        fence: on arm64, orders data in node memory before a message that announces them.
        doorbells: semaphores of the ranks of this node, posted after each message.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        tag: int,
        *,
        fence: Fence,
        doorbells: Mapping[int, Semaphore] | None = None,
    ) -> None:
        self._comm, self._tag, self._doorbells, self._fence = comm, tag, doorbells or {}, fence
        self._sending: list[MpiRequest] = []
        self._arriving: defaultdict[int, deque[_Arriving]] = defaultdict(deque)

    def send(self, to: int, content: object, tensors: Sequence[Tensor] = ()) -> None:
        """Start sending ``content`` and contiguous ``tensors`` to rank ``to``.

        The tensors must not change until the receiver has received them.
        """
        self.prune()
        shapes = [(tensor.numel(), tensor.dtype) for tensor in tensors]
        packed = pickle.dumps((content, shapes))
        if self._fence:
            self._fence()
        self._send([packed, MPI.BYTE], to, self._tag)
        for tensor in tensors:
            if tensor.numel():
                self._send(bytes_of(tensor), to, self._tag + 1, tensor)
        if to in self._doorbells:
            self._doorbells[to].post()

    def prune(self) -> None:
        """Free requests of completed sends. Called by the sending thread, or after its end."""
        self._sending = [one for one in self._sending if not one.Test()]

    def receive(self) -> list[Message]:
        """Return the messages that have arrived, without waiting, in the order of each sender."""
        status = MPI.Status()
        while (found := self._comm.Improbe(tag=self._tag, status=status)) is not None:
            packed = bytearray(status.Get_count(MPI.BYTE))
            request = requests.start(self._comm, found.Irecv, [packed, MPI.BYTE])
            source = status.Get_source()
            self._arriving[source].append(_Arriving(source, request, packed))
        came = []
        for queue in self._arriving.values():
            while queue and self._is_whole(queue[0]):
                one = queue.popleft()
                came.append(Message(one.source, one.content, one.tensors))
        if came and self._fence:
            self._fence()
        return came

    @property
    def is_quiet(self) -> bool:
        """Whether no message was in flight on this rank at the last ``prune`` and ``receive``."""
        return not self._sending and not any(self._arriving.values())

    def _send(self, buffer: list[object], to: int, tag: int, memory: Tensor | None = None) -> None:
        request = requests.start(self._comm, self._comm.Isend, buffer, to, tag, memory=memory)
        if not request.Test():
            self._sending.append(request)

    def _is_whole(self, one: _Arriving) -> bool:
        """Advance the next message of a sender; return whether it is complete."""
        if one.request is not None:
            if not one.request.Test():
                return False
            one.request = None
            one.content, shapes = unpickled(one.packed)
            one.tensors = [torch.empty(numel, dtype=dtype) for numel, dtype in shapes]
            one.parts = [
                requests.start(
                    *(self._comm, self._comm.Irecv, bytes_of(tensor), one.source, self._tag + 1),
                    memory=tensor,
                )
                for tensor in one.tensors
                if tensor.numel()
            ]
        return all([part.Test() for part in one.parts])  # noqa: C419 - each test makes progress


class DirectMessages:
    """Sends requests and replies between any two ranks, also from a rank to itself.

    The constructor is collective.

    Args:
        ranks: MPI communicator of the ranks of ``thread``; the constructor duplicates it.
        thread: receives requests.
        look: raises if a rank is lost.
        timeout_s: longest wait.
    """

    def __init__(
        self,
        ranks: MPI.Intracomm,
        thread: RequestThread,
        look: Callable[[], None],
        timeout_s: float,
    ) -> None:
        self._thread, self._is_stopped = thread, False
        self._owner = Owner()
        self._watch = Watch(lambda _: look(), rank=ranks.rank, timeout_s=timeout_s)
        self._comm = WatchedCalls(ranks, self._watch).duplicate()
        self.requests = Channel(self._comm, 0, fence=thread.fence, doorbells=thread.doorbells)
        self.replies = Channel(self._comm, 2, fence=thread.fence)

    def wait(self, done: Callable[[], object]) -> float:
        """Wait until ``done`` is true; return the seconds waited. Not collective.

        Raises:
            RankLostError: a rank is lost, or the wait exceeds the limit.
        """
        before = self._watch.waited_s
        if not done():
            self._watch.wait(done, _REPLY_PACE)
        return self._watch.waited_s - before

    def serve(self, work: Callable[[Sequence[Message]], bool]) -> None:
        """Let the request thread pass requests to ``work`` until ``work`` returns True."""
        self._work = work
        self._thread.add(self)

    def poll(self) -> Polled:
        """Process received requests. Called by the request thread."""
        try:
            came = self.requests.receive()
            is_over = bool(came) and self._work(came)
        except Exception as error:
            if not is_loss(error):
                raise
            return Polled(is_over=True)  # waiting ranks detect the loss themselves
        num_near = sum(one.source in self._thread.doorbells for one in came)
        return Polled(num_near, len(came) - num_near, is_over)

    def stop(self) -> None:
        """Stop processing requests. A no-op the second time. Not collective."""
        self._is_stopped = True
        self._thread.remove(self)

    def leave(self, ranks: Sequence[int], content: object) -> None:
        """Send the last request of this rank to ``ranks``. Not collective.

        A no-op after ``stop`` and in a forked child. A finalizer may call this method, on any
        thread.
        """
        for rank in ranks if self._owner.is_here and not self._is_stopped else ():
            self.requests.send(rank, content)

    def close(self) -> None:
        """Stop serving; free the communicator once no message is in flight. Collective."""
        self.stop()
        channels = (self.requests, self.replies)
        with contextlib.suppress(RankLostError):
            everyone: MpiRequest | None = None

            def done() -> bool:
                nonlocal everyone
                for channel in channels:
                    channel.prune()
                    channel.receive()
                if everyone is None and all(channel.is_quiet for channel in channels):
                    everyone = requests.start(self._comm, self._comm.Ibarrier)
                return False if everyone is None else everyone.Test()

            wait_until(done, self._watch.look, BY_MPI)
            requests.free(self._comm)
