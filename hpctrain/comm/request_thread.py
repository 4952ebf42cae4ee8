"""The thread that receives requests for all parameter servers of this rank."""

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.node.segments import LINE_BYTES, Fence, Semaphore, fence_of
from hpctrain.comm.waiting import SLEEP_SHARE
from hpctrain.core.libc import memory_at

_SHORTEST_S, _LONGEST_S = 100e-6, 0.5
_IDLE_S = 10.0  # polling interval if each request rings the doorbell


class Polled(NamedTuple):
    """Result of one poll of a service: how many requests have arrived."""

    num_near: int = 0  # requests from ranks of this node that have arrived
    num_far: int = 0  # requests from ranks of other nodes
    is_over: bool = False  # whether no more requests can arrive


class Service(Protocol):
    """A receiver of requests, called on the request thread."""

    def poll(self) -> Polled:
        """Process the requests that have arrived, without waiting."""


@dataclass(eq=False, slots=True)
class _Schedule:
    """Times at which the thread polls a service for requests of other nodes.

    These requests ring no doorbell.
    """

    asked_s: float  # time of the last request
    due_s: float = 0.0
    early_s: float = 0.0  # from this time on, polled together with services that are due

    def plan(self, now_s: float) -> None:
        """Set the time of the next poll, after a poll at ``now_s``."""
        pause_s = min(max(SLEEP_SHARE * (now_s - self.asked_s), _SHORTEST_S), _LONGEST_S)
        self.early_s, self.due_s = now_s + pause_s / 2, now_s + pause_s


class RequestThread:
    """Polls all services of this process, and sleeps while no rank sends requests.

    Ranks of this node ring the doorbell of the process, a semaphore, for each request. MPI wakes
    no thread, so the thread polls for requests of other nodes, with an interval of 2 % of the time
    since the last request and at most 0.5 s. Idle services are polled together. The thread ends
    when the last service is removed.
    """

    fence: Fence = None
    """Orders accesses to node memory on arm64."""

    def __init__(self) -> None:
        self.doorbells: Mapping[int, Semaphore] = {}
        """Doorbells of the ranks of this node, by rank."""
        self._services: dict[Service, _Schedule] = {}  # in the order of their last request
        self._lock = threading.RLock()  # held for changes of services and during polls
        self._thread: threading.Thread | None = None
        self._num_due, self._rung_s = 0, 0.0  # requests that have rung but not arrived

    def connect(self, comm: Communicator, mates: Sequence[int]) -> None:
        """Create missing doorbells. Collective; ``mates`` are the ranks of this node."""
        if self.doorbells:
            return
        self._memory = comm.new_bucket(2 * LINE_BYTES // 8, torch.int64)
        near = mates if self._memory.peers else [comm.rank]
        places = self._memory.peers or (self._memory.flat,)
        self.doorbells = {
            rank: Semaphore(memory_at(place.data_ptr(), LINE_BYTES))
            for rank, place in zip(near, places, strict=True)
        }
        spare = Semaphore(memory_at(self._memory.flat.data_ptr(), 2 * LINE_BYTES), LINE_BYTES)
        self._doorbell, self._has_far = self.doorbells[comm.rank], len(near) < comm.size
        self._doorbell.initialise()
        spare.initialise()
        self.fence = fence_of(spare)
        comm.barrier()  # no rank rings a doorbell before it is initialised

    def add(self, service: Service) -> None:
        """Add a service to poll; start the thread for the first service."""
        with self._lock:
            self._services[service] = _Schedule(time.perf_counter())
            self._wake()
            if self._thread is None:
                name = "hpctrain-server"
                self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._thread.start()

    def remove(self, service: Service) -> None:
        """Stop polling a service. A no-op the second time."""
        with self._lock:
            self._services.pop(service, None)
            ending = None if self._services else self._thread
            if ending is not None:
                self._wake()
        if ending is not None:
            ending.join()

    def _wake(self) -> None:
        """Wake the thread without a request."""
        self._num_due -= 1
        self._doorbell.post()

    def _run(self) -> None:
        is_rung = False
        while True:
            with self._lock:
                self._note_rings(int(is_rung))
                self._poll()
                if not self._services:
                    self._thread = None
                    return
                pause_s = self._pause_s()
            is_rung = self._doorbell.wait(pause_s)

    def _note_rings(self, num_rings: int) -> None:
        while self._doorbell.try_wait():
            num_rings += 1
        if num_rings:
            self._num_due += num_rings
            self._rung_s = time.perf_counter()

    def _poll(self) -> None:
        """Poll services that may have requests, the most recently used service first."""
        now_s = time.perf_counter()
        for service, schedule in [*reversed(self._services.items())]:
            if self._num_due <= 0 and not (self._has_far and now_s >= schedule.early_s):
                continue
            found = service.poll()
            self._num_due -= found.num_near
            if found.is_over:
                del self._services[service]
                continue
            now_s = time.perf_counter()
            if found.num_near or found.num_far:
                schedule.asked_s = now_s
                self._services[service] = self._services.pop(service)
            schedule.plan(now_s)

    def _pause_s(self) -> float:
        """Return the time until the next poll."""
        now_s = time.perf_counter()
        if self._num_due > 0:
            return min(max(SLEEP_SHARE * (now_s - self._rung_s), _SHORTEST_S), _LONGEST_S)
        if not self._has_far:
            return _IDLE_S
        return max(min(one.due_s for one in self._services.values()) - now_s, 0.0)
