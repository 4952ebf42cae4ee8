"""Parameter server: executes the requests of workers on a shard of the parameters."""

import math
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hpctrain.async_sgd.parameter_layout import VALUES, Slots
from hpctrain.async_sgd.parameter_shard import ParameterShard
from hpctrain.async_sgd.requirements import Roles
from hpctrain.async_sgd.server_messages import (
    Leave,
    Push,
    Read,
    Request,
    ServerMessages,
    ServerReply,
    Settle,
)
from hpctrain.comm.direct_messages import Message
from hpctrain.core.errors import CommError, HpctrainError, MismatchError, NotFiniteError
from hpctrain.core.units import by_rank


class ParameterServer(ABC):
    """Executes requests in order of arrival, on one shard of the parameters.

    The server runs on a thread of its rank, concurrently with the training. In a world of one
    rank, the server runs in the training thread while the rank waits for replies. A clock is the
    number of gradients that a worker has sent.

    Args:
        messages: channels of requests and replies.
        slots: buffers of gradients and values of the ranks of this node.
        roles: roles of all ranks.
        shard: parameters of this server.
        bound: number of gradients by which a worker may be ahead of the slowest worker: a worker
            receives values at clock c after all workers have reached c - ``bound``.
        warmup: clock that the first worker must reach before other workers receive values.
    """

    def __init__(
        self,
        messages: ServerMessages,
        slots: Slots,
        roles: Roles,
        shard: ParameterShard,
        *,
        bound: float = math.inf,
        warmup: int = 0,
    ) -> None:
        self._messages, self._slots, self._roles, self.shard = messages, slots, roles, shard
        self._bound, self.warmup = bound, warmup
        self._clocks = WorkerClocks(dict.fromkeys(roles.workers, 0))
        self._last_clock = 0  # the largest clock of any worker
        self._settled: dict[int, str] = {}  # by rank: the call in which the rank has settled
        self._left: set[int] = set()  # ranks that send no more requests
        self._waiting = defaultdict[int, set[int]](set)  # by clock: ranks that wait for values
        self._error: HpctrainError | None = None

    def start(self) -> None:
        """Start to execute requests, until every rank has left."""
        self._messages.serve(self._serve)

    def move(
        self, messages: ServerMessages, slots: Slots, roles: Roles, numbers: Mapping[int, int]
    ) -> None:
        """Continue in a world of the surviving ranks, which repeat their last requests.

        The server has stopped before this call. Requests of lost ranks that were not applied are
        dropped.

        Args:
            messages: messages of the new world.
            slots: slots of the new world.
            roles: roles in the new world.
            numbers: new rank of each surviving rank, by its old rank.
        """
        self._messages, self._slots, self._roles = messages, slots, roles
        self._clocks = WorkerClocks(renumbered(self._clocks.by_worker, numbers))
        self._waiting.clear()
        self._settled.clear()
        self._left = {numbers[rank] for rank in self._left if rank in numbers}
        self._renumber(numbers)
        with torch.no_grad():
            self._after_clock()
        self.start()

    # -- requests -----------------------------------------------------------------------------

    @torch.no_grad()
    def _serve(self, requests: Sequence[Message]) -> bool:
        """Execute requests; return whether every rank has left.

        An error is sent to all ranks at once, and in the reply to each later request.
        """
        for source, request, tensors in requests:
            try:
                if self._error is None:
                    self._execute(source, request, tensors)
                    self._answer_waiting()
                    continue
                asking: Sequence[int] = [] if isinstance(request, Leave) else [source]
            except Exception as error:  # all ranks raise the error
                text = f"the parameter server on rank {self._roles.rank} has failed: {error!r}"
                self._error = CommError(text)
                if isinstance(error, MismatchError | NotFiniteError):
                    self._error = error
                asking = range(self._roles.size)
            for rank in asking:
                self._messages.replies.send(rank, ServerReply(error=self._error))
        self._left.update(one.source for one in requests if isinstance(one.content, Leave))
        return len(self._left) == self._roles.size

    def _execute(self, source: int, request: Request, tensors: Sequence[Tensor]) -> None:
        if isinstance(request, Leave):
            if request.where:
                self._note_settled(source, request.where)
        elif isinstance(request, Read):
            self._waiting[request.clock].add(source)
        elif isinstance(request, Settle):
            self._note_settled(source, request.where)
            if len(self._settled) == self._roles.size:
                self._settle()
        else:
            self._apply_push(source, request, tensors)

    def _apply_push(self, source: int, request: Push, tensors: Sequence[Tensor]) -> None:
        if request.not_finite:
            raise NotFiniteError(
                f"gradients must be finite, but the gradient of {request.not_finite} on rank "
                f"{source} has NaN or inf; restart from a checkpoint with a smaller learning "
                f"rate, or call skip_step() instead of such a step"
            )
        clock = request.clock + 1
        if self._clocks.of(source) == clock:  # repeated after a recovery
            self._waiting[clock].add(source)
            return
        self._clocks.advance(source, clock)
        self._last_clock = max(self._last_clock, clock)
        is_near = source in self._slots
        if is_near:
            tensors = self.shard.parts(self._slots.of(source, request.slot))
        staleness = self._push(source, request._replace(parts=tensors, is_near=is_near))
        self._after_clock()
        if request.reads:
            self._waiting[clock].add(source)
        else:
            self._messages.replies.send(source, ServerReply(clock, staleness))

    def _answer_waiting(self) -> None:
        first = self._roles.workers[0]
        is_warm = self._clocks.of(first) >= self.warmup
        for clock in [each for each in self._waiting if self._clocks.least >= each - self._bound]:
            answered = self._waiting.pop(clock)
            if not is_warm and (early := answered - {first}):
                self._waiting[clock] = early
                answered &= {first}
            for source in sorted(answered):
                self._send_values(source, clock)

    def _send_values(self, source: int, clock: int) -> None:
        is_near = source in self._slots
        whole = self._slots.of(source if is_near else self._roles.rank, VALUES)
        out = self.shard.parts(whole)
        if not is_near:
            out = [torch.empty_like(part) for part in out]
        reply = ServerReply(clock, self._read(source, clock, out), has_values=True)
        self._messages.replies.send(source, reply, () if is_near else out)

    def _note_settled(self, source: int, where: str) -> None:
        """Record that ``source`` has settled, so that no other worker waits for its steps.

        Raises ``MismatchError`` if the ranks settle in different calls.
        """
        self._clocks.remove(source)
        self._settled.setdefault(source, where)  # a rank that has closed remains settled
        if self._settled[source] != next(iter(self._settled.values())):
            places = [self._settled.get(rank, "its steps") for rank in range(self._roles.size)]
            raise MismatchError(
                f"all ranks must reach the same settle(), finish() or end of the block, but the "
                f"ranks are in: {by_rank(places)}; call settle() and finish() on every rank"
            )
        self._after_clock()

    def _settle(self) -> None:
        """Send the current values, which include all updates, to all ranks; set clocks equal."""
        self._settled.clear()
        self._clocks = WorkerClocks(dict.fromkeys(self._roles.workers, self._last_clock))
        self._begin(self._last_clock)
        for rank in range(self._roles.size):
            self._send_values(rank, self._last_clock)

    # -- for subclasses -----------------------------------------------------------------------

    @abstractmethod
    def _push(self, source: int, push: Push) -> int:
        """Accept a gradient; return its staleness, or 0 if the staleness is not known yet."""

    def _after_clock(self) -> None:
        """Apply the steps that are complete now that a worker has advanced or settled."""
        return

    @abstractmethod
    def _read(self, source: int, clock: int, out: Sequence[Tensor]) -> int:
        """Write the values for ``source`` at ``clock`` to ``out``; return the staleness."""

    def _begin(self, clock: int) -> None:
        """Drop the gradients of steps before ``clock``. Called before all ranks read values."""
        del clock

    @abstractmethod
    def _renumber(self, numbers: Mapping[int, int]) -> None:
        """Assign requests of surviving workers to their new ranks; drop all other requests."""


def renumbered(values: Mapping[int, Any], numbers: Mapping[int, int]) -> dict[int, Any]:
    """Return ``values`` by new rank, given values by old rank; omit lost ranks."""
    return {numbers[rank]: value for rank, value in values.items() if rank in numbers}


class WorkerClocks:
    """Clocks of the workers that have not settled.

    A clock is the number of gradients that a worker has sent. All operations except the
    constructor take constant time on average, for any number of workers.

    Args:
        clocks: clock of each worker.
    """

    def __init__(self, clocks: Mapping[int, int]) -> None:
        self.by_worker = dict(clocks)
        self._num_at = Counter(self.by_worker.values())  # number of workers by clock
        self._least = min(self._num_at, default=0)

    def of(self, worker: int) -> float:
        """Return the clock of a worker; inf after the worker has settled."""
        return self.by_worker.get(worker, math.inf)

    def advance(self, worker: int, clock: int) -> None:
        """Set the clock of a worker to ``clock``, which must not be below the previous clock."""
        self.remove(worker)
        self.by_worker[worker] = clock
        self._num_at[clock] += 1

    def remove(self, worker: int) -> None:
        """Exclude a worker that has settled; no-op the second time."""
        if (clock := self.by_worker.pop(worker, None)) is not None:
            self._num_at[clock] -= 1
            if not self._num_at[clock]:
                del self._num_at[clock]

    @property
    def least(self) -> float:
        """The smallest clock; inf if all workers have settled."""
        if not self._num_at:
            return math.inf
        while self._least not in self._num_at:
            self._least += 1
        return self._least

    def num_up_to(self, clock: int) -> int:
        """Return the number of workers whose clock is at most ``clock``."""
        if (least := self.least) == math.inf:
            return 0
        return sum(self._num_at[each] for each in range(int(least), clock + 1))
