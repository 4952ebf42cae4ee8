"""Messages between any two ranks, with tensors, for those that serve and those that ask.

Two-sided MPI, as one-sided calls make progress only inside other calls of the target, under Open
MPI and MPICH alike: whoever is to answer while it computes needs a thread anyway.
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

_ASKING = BY_MPI._replace(yield_s=200e-6, shortest_s=50e-6, longest_s=1e-3)
"""Of who waits for servers, which nap: no sooner than they can answer."""


class Message(NamedTuple):
    """What has come."""

    source: int  # rank of the sender
    content: Any  # what was pickled
    tensors: Sequence[Tensor]


@dataclass(eq=False)
class _Arriving:
    source: int
    request: MpiRequest | None  # of the content
    packed: bytearray
    content: Any = None
    tensors: list[Tensor] = field(default_factory=list)
    parts: list[MpiRequest] = field(default_factory=list)


class Channel:
    """Messages of one kind. One thread of a rank sends them, one thread receives them."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        tag: int,
        *,
        fence: Fence,
        doorbells: Mapping[int, Semaphore] | None = None,
    ) -> None:
        """Take a communicator of which no other code uses this tag and the next one.

        ``doorbells`` are those of the ranks of this node, rung after each message to them. A
        message may announce data in node memory, which ``fence`` orders before it on arm64.
        """
        self._comm, self._tag, self._doorbells, self._fence = comm, tag, doorbells or {}, fence
        self._leaving: list[MpiRequest] = []
        self._arriving: defaultdict[int, deque[_Arriving]] = defaultdict(deque)

    def send(self, to: int, content: object, tensors: Sequence[Tensor] = ()) -> None:
        """Start to send; contiguous ``tensors`` stay as they are until the receiver has them."""
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
        """Forget what has been sent. Called by the sending thread, or when no thread is left."""
        self._leaving = [one for one in self._leaving if not one.Test()]

    def receive(self) -> list[Message]:
        """Return what has come whole, without waiting; in order for each sender."""
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
        """Whether nothing is under way at this rank, at the last look."""
        return not self._leaving and not any(self._arriving.values())

    def _send(self, buffer: list[object], to: int, tag: int, memory: Tensor | None = None) -> None:
        request = requests.start(self._comm, self._comm.Isend, buffer, to, tag, memory=memory)
        if not request.Test():
            self._leaving.append(request)

    def _is_whole(self, one: _Arriving) -> bool:
        """Go on receiving a message, which is the next of its sender; say whether it is there."""
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
        return all([part.Test() for part in one.parts])  # noqa: C419 - each makes progress


class DirectMessages:
    """Requests and replies between any two ranks of a world, also of a rank to itself."""

    def __init__(
        self,
        ranks: MPI.Intracomm,
        thread: RequestThread,
        look: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """Duplicate ``ranks``, those that ``thread`` was connected to. Collective.

        ``look`` raises where a rank is lost; no wait may last longer than ``timeout_s``.
        """
        self._thread, self._is_stopped = thread, False
        self._owner = Owner()
        self._watch = Watch(lambda _: look(), rank=ranks.rank, timeout_s=timeout_s)
        self._comm = WatchedCalls(ranks, self._watch).duplicate()
        self.requests = Channel(self._comm, 0, fence=thread.fence, doorbells=thread.doorbells)
        self.replies = Channel(self._comm, 2, fence=thread.fence)

    def wait(self, done: Callable[[], object]) -> float:
        """Sleep until it is done; return the seconds. ``RankLostError`` as all waits."""
        before = self._watch.waited_s
        if not done():
            self._watch.wait(done, _ASKING)
        return self._watch.waited_s - before

    def serve(self, work: Callable[[Sequence[Message]], bool]) -> None:
        """Let the request thread call ``work`` with requests that arrive, until it is true."""
        self._work = work
        self._thread.add(self)

    def poll(self) -> Polled:
        """Carry out the requests that have arrived. Called by the request thread."""
        try:
            came = self.requests.receive()
            is_over = bool(came) and self._work(came)
        except Exception as error:
            if not is_loss(error):
                raise
            return Polled(is_over=True)  # ranks that wait find by themselves that a rank is lost
        num_near = sum(one.source in self._thread.doorbells for one in came)
        return Polled(num_near, len(came) - num_near, is_over)

    def stop(self) -> None:
        """Carry out no more requests. Harmless the second time. Not collective."""
        self._is_stopped = True
        self._thread.remove(self)

    def leave(self, ranks: Sequence[int], content: object) -> None:
        """Send the last request of this rank to ``ranks``, if that is still possible.

        Not collective. Garbage collection calls it on any thread, also in a forked child.
        """
        for rank in ranks if self._owner.is_here and not self._is_stopped else ():
            self.requests.send(rank, content)

    def close(self) -> None:
        """Stop serving; free the communicator once nothing is in flight. Collective."""
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
