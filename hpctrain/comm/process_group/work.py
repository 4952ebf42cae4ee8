"""Operations of a process group that were started, and the queue that carries them out."""

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
    """A collective that was started: carried out by whoever calls ``carry_out``, once.

    Its future completes where it is carried out, and so do the callbacks of that: what they
    communicate in their turn comes before what the program has started meanwhile.
    """

    # Slots, and defaults of the class: to set all for each operation costs a microsecond of the
    # ten that a small one takes.
    __slots__ = ("__dict__", "_guard", "_result", "function", "name", "number")
    error: BaseException | None = None
    queue: "OperationQueue | None" = None  # where it waits for its turn, if it does
    is_told = False  # whether the others can see that this rank waits in it
    _over: threading.Event | None = None
    _end: "Future[None] | None" = None  # completes with the operation, and ``_future`` after it
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
        """Take what is to be done, and what a future of it holds.

        ``guard`` calls ``function`` and raises what users shall see; ``name`` and the ``number``
        within the group are for messages.
        """
        super().__init__()
        self.name, self.number = name, number
        self.function = function
        self._guard = guard
        self._result = result

    def carry_out(self) -> None:
        """Do it; what goes wrong is for ``wait``."""
        try:
            if self._inference is None:
                self._guard(self)
            else:  # what is made in inference mode cannot be written outside of it
                with torch.inference_mode(self._inference):
                    self._guard(self)
        except BaseException as error:
            self.error = error

    def complete(self) -> None:
        """Let those who wait go on, and the callbacks of the future run here."""
        if self._over is None and self._future is None:  # nobody can have seen it
            return
        with _completing:
            self.queue, over, end = None, self._over, self._end
        if over is not None:
            over.set()
        if end is not None:
            end.set_result(None)

    def will_wait(self, queue: "OperationQueue") -> None:
        """Say that it is carried out later, by a queue."""
        self.queue, self._over = queue, threading.Event()
        self._inference = torch.is_inference_mode_enabled()

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is over; raise what went wrong."""
        queue, over = self.queue, self._over
        if queue is not None and over is not None:
            seconds = timeout.total_seconds() if timeout is not None else 0.0
            if not queue.wait_for(over, seconds if seconds > 0 else None):
                raise torch.distributed.DistBackendError(
                    f"{self.name} is not over after the {seconds:g} s that wait() was told; the "
                    f"other ranks may not have called it: see what they do"
                )
        if self.error is not None:
            raise self.error
        return True

    def is_completed(self) -> bool:
        """Say whether ``wait`` would return at once."""
        return self.queue is None

    def is_success(self) -> bool:
        """Say whether it is over and went well."""
        return self.queue is None and self.error is None

    def exception(self) -> BaseException | None:
        """Return what went wrong."""
        return self.error

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors that the operation writes.

        An error of the operation is a ``RuntimeError`` with its text where a future is read:
        ``set_exception`` would store the error as a value, which C++ code such as
        DistributedDataParallel takes for tensors.
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
        """Do what ``wait`` does."""
        self.wait()

    def _outcome(self, _: Future[None]) -> Any:
        if self.error is not None:
            raise self.error
        return self._result


class Several(Base):  # type: ignore[misc]
    """Operations that were started one by one, and are waited for together."""

    def __init__(self, works: Sequence[Work]) -> None:
        """Take them."""
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for each."""
        del timeout  # the limit of the group counts
        for work in self._works:
            work.wait()
        return True

    def is_completed(self) -> bool:
        """Say whether all are over."""
        return all(work.is_completed() for work in self._works)

    def get_future(self) -> Future[Any]:
        """Return a future of what they write; waits for it."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self.result())
        return future

    def result(self) -> Any:
        """Return what they write."""
        return [work.result() for work in self._works]


_completing = threading.Lock()
"""Held for a moment when an operation is over, and when its future is made."""


class OperationQueue:
    """Carries out the operations of a group one at a time, in the order in which they came.

    What the caller waits for anyway and finds nothing under way needs no thread.
    """

    def __init__(self, name: str, *, has_thread: bool) -> None:
        """Take a name for the thread, which exists from the first operation on that needs it.

        Without a thread each operation is carried out where it is started.
        """
        self._name = name
        self._has_thread = has_thread
        self._waiting: SimpleQueue[Operation | None] = SimpleQueue()
        self._counting = threading.Lock()
        self._num_waiting = 0
        self._turn = threading.Lock()
        """Held while one is carried out: here by a caller, or on the thread."""
        self._thread: threading.Thread | None = None
        self._thread_id: int | None = None

    def begin(self) -> bool:
        """Say whether nothing is under way; then nothing is carried out until ``end``."""
        # On the thread itself one is under way, that whose callbacks run.
        return self._num_waiting == 0 and self._turn.acquire(False)  # noqa: FBT003 - as fast again

    def end(self) -> None:
        """Let others be carried out again."""
        self._turn.release()

    def drain(self, guard: "Callable[[Operation], object]") -> None:
        """Return when the operations that were started before are complete."""
        last = Operation(guard, lambda: None, None, "drain", 0)
        self.start(last)
        with suppress(CommError):
            last.wait()

    def start(self, operation: Operation) -> None:
        """Carry out one when its turn comes; on the thread itself at once."""
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
        """Return when ``over`` is set, False when time is up.

        A callback on the thread that waits for an operation behind it lets that come first.
        """
        while self._is_here and not over.is_set():
            self._carry_out(self._waiting.get())
        return over.wait(timeout_s)

    def close(self) -> None:
        """Carry out what has come, and end the thread."""
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
        # Gradients are as little wanted here as in the backward pass.
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
    """A message on its way, completed by whoever waits for it or asks."""

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
        """Take a transfer of the wire; ``after`` is called when it is complete.

        ``lock`` is held whenever the wire is asked: several threads may have messages on it.
        ``named`` says in an error of a wait which message that is.
        """
        super().__init__()
        self._wire, self._transfer, self._tensors = wire, transfer, list(tensors)
        self._after, self._lock, self._named = after, lock, named
        self._is_over = False

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is complete; sleep meanwhile."""
        del timeout  # the limit of the group counts
        try:
            if not self.is_completed():
                self._wire.wait_for(self._transfer, self.is_completed)
        except CommError as error:
            with self._lock:
                self._transfer.cancel()
            raise self._named(error) from error
        return True

    def is_completed(self) -> bool:
        """Say whether it is complete."""
        with self._lock:
            if not self._is_over and self._wire.is_finished(self._transfer):
                self._after()
                self._is_over = True
            return self._is_over

    def is_success(self) -> bool:
        """Say whether it is complete."""
        return self.is_completed()

    def source_rank(self) -> int:
        """Return the rank at the other end."""
        return -1 if self._transfer.partner is None else self._transfer.partner

    _source_rank = source_rank

    def get_future(self) -> Future[Any]:
        """Return a future of the tensors; waits for them."""
        self.wait()
        future: Future[Any] = Future()
        future.set_result(self._tensors)
        return future

    def result(self) -> Any:
        """Return the tensors."""
        return self._tensors

    def synchronize(self) -> None:
        """Do what ``wait`` does."""
        self.wait()
