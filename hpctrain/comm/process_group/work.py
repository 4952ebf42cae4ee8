"""Operations of a process group, and the queue that runs them."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

from hpctrain.core.errors import CommError

if TYPE_CHECKING:
    from hpctrain.comm.rail.rail import MpiWire, Transfer

    Base: Any
else:
    Base = Work


class Operation(Base):  # type: ignore[misc]
    """A collective of a process group; ``carry_out`` runs it once.

    Callbacks of the future run on the thread that runs the operation. Collectives that a callback
    starts run before operations that are queued.

    Args:
        guard: calls ``function`` and converts its errors to errors for users.
        function: the collective.
        result: the tensors that the operation writes.
        name: name of the operation, for messages.
        number: number of the operation in the group, for messages.
    """

    # Slots and class defaults: setting all attributes costs 1 us of the 10 us of a small
    # operation.
    __slots__ = ("__dict__", "_guard", "_result", "function", "name", "number")
    error: BaseException | None = None
    queue: "OperationQueue | None" = None  # the queue, while the operation waits in it
    has_reported = False  # whether this rank has reported that it waits
    _over: threading.Event | None = None
    _end: "Future[None] | None" = None  # set with the operation; completes ``_future``
    _future: "Future[Any] | None" = None
    _inference: bool | None = None

    def __init__(
        self,
        guard: "Callable[[Operation], object]",
        function: Callable[[], object],
        result: Any,
        name: str,
        number: int,
    ) -> None:
        super().__init__()
        self.name, self.number = name, number
        self.function = function
        self._guard = guard
        self._result = result

    def carry_out(self) -> None:
        """Run the operation, and store its error for ``wait`` to raise."""
        try:
            if self._inference is None:
                self._guard(self)
            else:  # tensors created in inference mode are not writable outside
                with torch.inference_mode(self._inference):
                    self._guard(self)
        except BaseException as error:
            self.error = error

    def complete(self) -> None:
        """Wake waiting callers and run the callbacks of the future on this thread."""
        if self._over is None and self._future is None:  # no caller waits
            return
        with _completing:
            self.queue, over, end = None, self._over, self._end
        if over is not None:
            over.set()
        if end is not None:
            end.set_result(None)

    def will_wait(self, queue: "OperationQueue") -> None:
        """Record that ``queue`` runs the operation later."""
        self.queue, self._over = queue, threading.Event()
        self._inference = torch.is_inference_mode_enabled()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the operation is complete; raise its error."""
        queue, over = self.queue, self._over
        if queue is not None and over is not None:
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            if not queue.wait_for(over, seconds if seconds > 0 else None):
                raise torch.distributed.DistBackendError(
                    f"{self.name} must complete within the timeout of wait(), {seconds:g} s, but "
                    f"is still in progress; check whether the other ranks have called {self.name}"
                )
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Return whether the operation is complete."""
        return self.queue is None

    def is_success(self) -> bool:
        """Return whether the operation is complete without an error."""
        return self.queue is None and self.error is None

    def exception(self) -> BaseException | None:
        """Return the error of the operation, or None."""
        return self.error

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors that the operation writes.

        If the operation fails, reading the future raises ``RuntimeError`` with the message.
        ``set_exception`` would store the error as a value, and C++ code such as
        DistributedDataParallel would use this value as tensors.
        """
        with _completing:
            is_new, is_over = self._future is None, self.queue is None
            if self._end is None or self._future is None:
                self._end = Future()
                self._future = self._end.then(self._outcome)
            future, end = self._future, self._end
        if is_new and is_over:
            end.set_result(None)
        return future

    def result(self) -> Any:
        """Return the tensors that the operation writes."""
        return self._result

    def synchronize(self) -> None:
        """Call ``wait``."""
        self.wait()

    def _outcome(self, _: Future[None]) -> Any:
        if self.error is not None:
            raise self.error
        return self._result


class Several(Base):  # type: ignore[misc]
    """Several operations; ``wait`` waits for all of them.

    Args:
        works: the operations.
    """

    def __init__(self, works: Sequence[Work]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for all operations."""
        del timeout  # the limit of the group applies
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Return whether all operations are complete."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Future[Any]:
        """Wait for all operations; return a future with their results."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self.result())
        return future

    def result(self) -> Any:
        """Return the results of all operations."""
        return [work.result() for work in self._works]


_completing = threading.Lock()
"""Held briefly when an operation completes and when its future is created."""


class OperationQueue:
    """Runs the operations of a group one at a time, in the order of their start.

    If the queue is idle, a synchronous operation runs on the caller's thread.

    Args:
        name: name of the thread, which is started by the first operation that needs it.
        has_thread: False to run each operation on the thread that starts it.
    """

    def __init__(self, name: str, *, has_thread: bool) -> None:
        self._name = name
        self._has_thread = has_thread
        self._waiting: SimpleQueue[Operation | None] = SimpleQueue()
        self._counting = threading.Lock()
        self._num_waiting = 0
        self._turn = threading.Lock()
        """Held while an operation runs, on a caller's thread or on the thread of the queue."""
        self._thread: threading.Thread | None = None
        self._thread_id: int | None = None

    def begin(self) -> bool:
        """Block the queue until ``end`` and return True; return False if the queue is not idle."""
        # On the queue's thread ``_num_waiting`` counts the operation whose callbacks run.
        return self._num_waiting == 0 and self._turn.acquire(False)  # noqa: FBT003 - twice as fast

    def end(self) -> None:
        """Unblock the queue after ``begin``."""
        self._turn.release()

    def drain(self, guard: "Callable[[Operation], object]") -> None:
        """Wait until all operations that were started before are complete."""
        last = Operation(guard, lambda: None, None, "drain", 0)
        self.start(last)
        with suppress(CommError):
            last.wait()

    def start(self, operation: Operation) -> None:
        """Queue an operation; on the queue's own thread, run it before returning."""
        if self._is_here:
            operation.carry_out()
            operation.complete()
            return
        if not self._has_thread:
            with self._turn:
                operation.carry_out()
            operation.complete()
            return
        operation.will_wait(self)
        with self._counting:
            self._num_waiting += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
                self._thread.start()
        self._waiting.put(operation)

    def wait_for(self, over: threading.Event, timeout_s: float | None) -> bool:
        """Wait until ``over`` is set; return False on timeout.

        In a callback, which runs on the queue's thread, run queued operations during the wait.
        """
        while self._is_here and not over.is_set():
            self._carry_out(self._waiting.get())
        return over.wait(timeout_s)

    def close(self) -> None:
        """Run the queued operations, then end the thread."""
        with self._counting:
            thread, self._thread = self._thread, None
        if thread is not None:
            self._waiting.put(None)
            thread.join()
            self._thread_id = None

    @property
    def _is_here(self) -> bool:
        return threading.get_ident() == self._thread_id

    def _serve(self) -> None:
        self._thread_id = threading.get_ident()
        # Operations must not be recorded by autograd, as in a backward pass.
        with torch.no_grad():
            while (operation := self._waiting.get()) is not None:
                self._carry_out(operation)
                del operation

    def _carry_out(self, operation: Operation | None) -> None:
        if operation is None:
            return
        with self._turn:
            operation.carry_out()
        operation.complete()
        with self._counting:
            self._num_waiting -= 1


class Message(Base):  # type: ignore[misc]
    """A message in flight, which a thread completes when it waits for or tests the message.

    Args:
        wire: the wire of the message.
        transfer: the transfer on the wire.
        tensors: the tensors that are sent or received.
        after: called when the transfer is complete.
        lock: held during calls of the wire, which several threads may use.
        named: converts the error of a wait to an error that names the message.
    """

    def __init__(
        self,
        wire: "MpiWire",
        transfer: "Transfer",
        tensors: Sequence[Tensor],
        *,
        after: Callable[[], object],
        lock: threading.Lock,
        named: Callable[[CommError], CommError],
    ) -> None:
        super().__init__()
        self._wire, self._transfer, self._tensors = wire, transfer, list(tensors)
        self._after, self._lock, self._named = after, lock, named
        self._is_over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the message is complete."""
        del timeout  # the limit of the group applies
        try:
            if not self.is_completed():
                self._wire.wait_for(self._transfer, self.is_completed)
        except CommError as error:
            with self._lock:
                self._transfer.cancel()
            raise self._named(error) from error
        return True

    def is_completed(self) -> bool:
        """Return whether the message is complete."""
        with self._lock:
            if not self._is_over and self._wire.is_finished(self._transfer):
                self._after()
                self._is_over = True
            return self._is_over

    def is_success(self) -> bool:
        """Return whether the message is complete."""
        return self.is_completed()

    def source_rank(self) -> int:
        """Return the rank at the other end of the message; -1 if not yet known."""
        return -1 if self._transfer.partner is None else self._transfer.partner

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Wait for the message; return a future with the tensors."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future

    def result(self) -> Any:
        """Return the tensors that were sent or received."""
        return self._tensors

    def synchronize(self) -> None:
        """Call ``wait``."""
        self.wait()
