"""Messages between any two ranks, with tensors, for those that serve and those that ask.

Two-sided MPI, as one-sided calls make progress only inside other calls of the target, under Open
MPI and MPICH alike: whoever is to answer while it computes needs a thread anyway.
"""

import contextlib
import pickle
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.comm import requests
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.mpi_start import MPI
from hpctrain.comm.mpi_world import is_loss
from hpctrain.comm.node.segments import LINE_BYTES, Fence, Semaphore, fence_of
from hpctrain.comm.owner import Owner
from hpctrain.comm.rail.rail import bytes_of
from hpctrain.comm.requests import MpiRequest
from hpctrain.comm.waiting import BY_MPI, Pace, Watch, wait_until
from hpctrain.comm.watched_calls import WatchedCalls
from hpctrain.core.errors import RankLostError
from hpctrain.core.libc import memory_at

_SERVING = BY_MPI._replace(spin_s=0.0, yield_s=0.0, shortest_s=100e-6, longest_s=0.5)
"""Pace of a serving thread while a request can come that rings no doorbell. The thread only naps:
it must not take the core from the training."""
_AT_REST = Pace(0.0, 0.0, shortest_s=10.0, longest_s=10.0)
"""Pace of a serving thread whose doorbell is rung for every request: each wake-up takes time."""
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
            one.content, shapes = pickle.loads(one.packed)  # noqa: S301 - by ranks of this job
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
        comm: Communicator,
        ranks: MPI.Intracomm,
        mates: Sequence[int],
        look: Callable[[], None],
        timeout_s: float,
    ) -> None:
        """Duplicate ``ranks``, which are those of ``comm``. Collective.

        ``mates`` are the ranks of this node. ``look`` raises where a rank is lost; no wait may
        last longer than ``timeout_s``.
        """
        self._memory = comm.new_bucket(2 * LINE_BYTES // 8, torch.int64)
        near = mates if self._memory.peers else [comm.rank]
        places = self._memory.peers or (self._memory.flat,)
        self._doorbells = {
            rank: Semaphore(memory_at(place.data_ptr(), LINE_BYTES))
            for rank, place in zip(near, places, strict=True)
        }
        own = memory_at(self._memory.flat.data_ptr(), 2 * LINE_BYTES)
        self._doorbell, spare = self._doorbells[comm.rank], Semaphore(own, LINE_BYTES)
        self._doorbell.initialise()
        spare.initialise()
        comm.barrier()  # no rank rings a doorbell before it is there
        self._has_far = len(near) < comm.size
        self._num_due = 0  # requests whose doorbell was rung and which have not come whole
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self._owner = Owner()
        self._watch = Watch(lambda _: look(), rank=ranks.rank, timeout_s=timeout_s)
        self._comm = WatchedCalls(ranks, self._watch).duplicate()
        self.requests = Channel(self._comm, 0, fence=fence_of(spare), doorbells=self._doorbells)
        self.replies = Channel(self._comm, 2, fence=fence_of(spare))

    def wait(self, done: Callable[[], object]) -> float:
        """Sleep until it is done; return the seconds. ``RankLostError`` as all waits."""
        before = self._watch.waited_s
        if not done():
            self._watch.wait(done, _ASKING)
        return self._watch.waited_s - before

    def serve(self, work: Callable[[Sequence[Message]], bool]) -> None:
        """Start a thread that calls ``work`` with the requests that have come, until it is true.

        Without requests the thread sleeps. Ranks of this node wake it by a doorbell; requests of
        others are noticed after at most 2 % of the time since the last one, and half a second.
        """
        name = "hpctrain-server"
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Sequence[Message]], bool]) -> None:
        came: list[Message] = []

        def has_come() -> bool:
            came.extend(self.requests.receive())
            return self._is_stopped or bool(came)

        try:
            while not self._is_stopped:
                if not has_come():
                    is_polling = self._has_far or self._num_due > 0
                    pace = _SERVING if is_polling else _AT_REST
                    wait_until(has_come, lambda _: None, pace, nap=self._nap)
                self._num_due -= sum(one.source in self._doorbells for one in came)
                if came and work([*came]):
                    return
                came.clear()
        except Exception as error:
            if not is_loss(error):
                raise  # else ranks that wait find by themselves that a rank is lost

    def _nap(self, seconds: float) -> bool:
        is_rung = self._doorbell.wait(seconds)
        self._num_due += is_rung
        return is_rung

    def stop(self) -> None:
        """End the serving thread. Harmless the second time. Not collective."""
        self._is_stopped = True
        if self._thread is not None:
            self._doorbell.post()
            self._thread.join()
            self._thread = None

    def leave(self, ranks: Sequence[int], content: object) -> None:
        """Send the last request of this rank to ``ranks``, if that is still possible.

        Not collective. Garbage collection calls it on any thread, also in a forked child.
        """
        for rank in ranks if self._owner.is_here and not self._is_stopped else ():
            self.requests.send(rank, content)

    def close(self) -> None:
        """End the thread; free the communicator once nothing is in flight. Collective."""
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
