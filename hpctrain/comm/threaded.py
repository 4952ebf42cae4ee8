"""A communicator that runs all operations on one thread, in order."""

import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from hpctrain.comm.bucket import Bucket
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.operation_result import FINISHED, Traffic, Work
from hpctrain.comm.ops import Op
from hpctrain.comm.owner import Owner

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class ThreadWork:
    """An operation that runs on a communication thread.

    Args:
        future: result of the operation.
    """

    def __init__(self, future: Future[Any]) -> None:
        self.is_awaited = False
        """Whether ``wait()`` was called, so that its caller receives an error."""
        self._future = future

    def wait(self) -> None:
        """Wait until the operation is complete; raise its error."""
        self.is_awaited = True
        self._future.result()

    def error(self) -> BaseException | None:
        """Wait until the operation is complete; return its error, or None."""
        return self._future.exception()

    def done(self) -> bool:
        """Return whether the operation is complete."""
        return self._future.done()


class ThreadedCommunicator:
    """Runs the operations of another communicator on a separate thread, in order.

    ``Communicator`` documents the methods. Any thread may call a method; all ranks must make
    the calls in the same order. ``allreduce_`` and ``broadcast_`` return before the operation is
    complete; the caller must not use the tensor until ``wait()`` returns. All other methods wait
    for their result, and so for all operations that were started before.

    ``wait()`` raises the error of its operation; later operations still run. Functions that run
    on the thread may use this communicator, and their operations run before queued ones.

    Args:
        comm: runs the operations. No other code may use it; ``close`` closes it.
    """

    def __init__(self, comm: Communicator) -> None:
        self.rank = comm.rank
        self.size = comm.size
        self._comm = comm
        self._thread = ThreadPoolExecutor(1, "hpctrain-comm", self._remember)
        self._thread_id: int | None = None
        self._owner = Owner()
        self._works: list[ThreadWork] = []
        self._lent: list[ThreadedCommunicator] = []
        self._owners: list[weakref.ref[object]] = []  # owner of each lent communicator

        # Used by functions that run on the thread, see ``start_on``.
        self.node, self.num_rails, self.node_ranks = comm.node, comm.num_rails, comm.node_ranks
        self.internode, self.part_of = comm.internode, comm.part_of
        self.reduce_node, self.publish = comm.reduce_node, comm.publish

    def submit(self, function: Callable[..., object], *args: object) -> ThreadWork:
        """Queue a call of ``function`` on the thread, after all operations started before."""
        work = ThreadWork(self._start(partial(function, *args)))
        self._works = [w for w in self._works if not w.is_awaited] + [work]
        return work

    def allreduce_(
        self, tensor: Tensor | Bucket, *, op: Op = Op.SUM, scale: float | None = None
    ) -> ThreadWork:
        """Start the reduction."""
        return self.submit(lambda: self._comm.allreduce_(tensor, op=op, scale=scale).wait())

    def broadcast_(self, tensor: Tensor, root: int = 0) -> ThreadWork:
        """Start the broadcast."""
        return self.submit(lambda: self._comm.broadcast_(tensor, root).wait())

    def __getattr__(self, name: str) -> Any:
        """Return a function that runs the operation ``name`` on the thread and waits."""
        if name.startswith("_"):
            raise AttributeError(name)
        method = getattr(self._comm, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._start(partial(method, *args, **kwargs)).result()

        return call

    def group(self, ranks: Sequence[int]) -> "ThreadedCommunicator | None":
        """Create a group with its own thread."""
        made = self._start(lambda: self._comm.group(ranks)).result()
        return None if made is None else ThreadedCommunicator(made)

    def lend(self, owner: object) -> "ThreadedCommunicator":
        """Return a second communicator of the same ranks with its own thread. Collective.

        Operations of the two communicators are not ordered. A later call returns the same
        communicator if, on all ranks, ``owner`` was freed and no operation is in progress.

        Args:
            owner: object whose lifetime determines how long the communicator is used.
        """
        lent = enumerate(zip(self._lent, self._owners, strict=True))
        free = {i for i, (one, of) in lent if of() is None and one.is_idle}
        of_all = set.intersection(*self.allgather_object(free))
        number = min(of_all, default=len(self._lent))
        if not of_all:
            made = self.group(range(self.size))
            assert made is not None
            self._lent.append(made)
        self._owners[number:] = [weakref.ref(owner), *self._owners[number + 1 :]]
        return self._lent[number]

    def traffic(self) -> Traffic:
        """Return the counters, without waiting for operations that are not complete."""
        return self._comm.traffic()

    def drain(self) -> None:
        """Wait for all operations, end the thread, and log errors that no ``wait()`` raised."""
        for one in self._lent:  # unfinished work of lent communicators is not an error
            one.end_thread()
        self.end_thread()
        for work in self._works:
            if not work.is_awaited and (error := work.error()) is not None:
                _LOG.error("an operation failed, and its wait() was not called: %s", error)
        self._works = []

    def drop(self) -> None:
        """End the threads after the loss of ranks, without logging errors. Not collective."""
        for one in self._lent:
            one.drop()
        self.end_thread()
        self._works = []

    def end_thread(self) -> None:
        """End the thread after it has run all started operations."""
        self._thread.shutdown()

    def close_unread(self) -> None:
        """Close the communicator after ``end_thread``; errors are not logged."""
        self._comm.close()

    def close(self) -> None:
        """Call ``drain``, then close the communicator."""
        self.drain()
        for one in self._lent:
            one.close_unread()
        self.close_unread()

    @property
    def is_idle(self) -> bool:
        """Whether all started operations are complete."""
        return all(work.done() for work in self._works)

    def _start(self, function: Callable[[], T]) -> Future[T]:
        self._owner.check()
        if threading.get_ident() != self._thread_id:
            return self._thread.submit(function)
        done: Future[T] = Future()
        try:
            done.set_result(function())
        except BaseException as error:  # raised by wait(), as for queued operations
            done.set_exception(error)
        return done

    def _remember(self) -> None:
        self._thread_id = threading.get_ident()


def start_on(comm: Communicator, function: Callable[..., object], *args: object) -> Work:
    """Call ``function``, which communicates, on the thread of ``comm`` if there is one."""
    if isinstance(comm, ThreadedCommunicator):
        return comm.submit(function, *args)
    function(*args)
    return FINISHED
