"""Messages between any two ranks, with tensors, for those that serve and those that ask.

Two-sided MPI, as one-sided calls make progress only inside other calls of the target, under Open
MPI and MPICH alike: whoever is to answer while it computes needs a thread anyway.
"""

import contextlib
import pickle
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm import requests
from hpctrain.comm.rail.rail import bytes_of
from hpctrain.comm.requests import MpiRequest
from hpctrain.comm.waiting import BY_MPI, Watch, wait_until
from hpctrain.comm.watched_calls import WatchedCalls
from hpctrain.core.errors import RankLostError

SERVING = BY_MPI._replace(spin_s=0.0, yield_s=0.0, shortest_s=100e-6, longest_s=1e-3)
"""Of a thread beside the training: only naps, as it must not take the core from it."""
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

    def __init__(self, comm: MPI.Intracomm, tag: int) -> None:
        """Take a communicator of which nobody else uses this tag and the next one."""
        self._comm, self._tag = comm, tag
        self._leaving: list[MpiRequest] = []
        self._arriving: defaultdict[int, deque[_Arriving]] = defaultdict(deque)

    def send(self, to: int, content: object, tensors: Sequence[Tensor] = ()) -> None:
        """Start to send; contiguous ``tensors`` stay as they are until the receiver has them."""
        shapes = [(tensor.numel(), tensor.dtype) for tensor in tensors]
        packed = pickle.dumps((content, shapes))
        self._send([packed, MPI.BYTE], to, self._tag)
        for tensor in tensors:
            if tensor.numel():
                self._send(bytes_of(tensor), to, self._tag + 1, tensor)

    def receive(self) -> list[Message]:
        """Return what has come whole, without waiting; in order for each sender."""
        self._leaving = [one for one in self._leaving if not one.Test()]
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

    def __init__(self, ranks: MPI.Intracomm, look: Callable[[], None], timeout_s: float) -> None:
        """Duplicate a communicator. Collective.

        ``look`` raises where a rank is lost; no wait may last longer than ``timeout_s``.
        """
        self._watch = Watch(lambda _: look(), rank=ranks.rank, timeout_s=timeout_s)
        self._comm = WatchedCalls(ranks, self._watch).duplicate()
        self.requests, self.replies = Channel(self._comm, 0), Channel(self._comm, 2)

    def wait(self, done: Callable[[], object]) -> float:
        """Sleep until it is done; return the seconds. ``RankLostError`` as all waits."""
        before = self._watch.waited_s
        if not done():
            self._watch.wait(done, _ASKING)
        return self._watch.waited_s - before

    def close(self) -> None:
        """Free the communicator once nothing is under way. Collective; no thread uses it."""
        channels = (self.requests, self.replies)
        with contextlib.suppress(RankLostError):
            everyone: MpiRequest | None = None

            def done() -> bool:
                nonlocal everyone
                for channel in channels:
                    channel.receive()
                if everyone is None and all(channel.is_quiet for channel in channels):
                    everyone = requests.start(self._comm, self._comm.Ibarrier)
                return False if everyone is None else everyone.Test()

            wait_until(done, self._watch.look, BY_MPI)
            requests.free(self._comm)
