"""Operations of a process group that were started, and the queue that carries them out."""

import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import Work
from torch.futures import Future

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

    def __init__(self, function: Callable[[], object], result: Any, name: str) -> None:
        """Take what is to be done, what a future of it holds, and its name for messages."""
        super().__init__()
        self.name = name
        self.error: BaseException | None = None
        self.queue: OperationQueue | None = None  # where it waits for its turn, if it does
        self._function: Callable[[], object] | None = function
        self._result = result
        self._future: Future[Any] | None = None
        self._completing = threading.Lock()
        self._over: threading.Event | None = None
        # What is made in inference mode cannot be written outside of it.
        self._inference = torch.is_inference_mode_enabled()

    @classmethod
    def of_works(cls, works: Sequence[Work]) -> "Operation":
        """Return one that is over as soon as all of these are."""

        def wait_for_all() -> None:
            for work in works:
                work.wait()

        return _Several(wait_for_all, [work.result() for work in works], "operations in one")

    def carry_out(self) -> None:
        """Do it; what goes wrong is for ``wait``."""
        function, self._function = self._function, None
        assert function is not None
        try:
            if self._inference != torch.is_inference_mode_enabled():
                with torch.inference_mode(self._inference):
                    function()
            else:
                function()
        except BaseException as error:
            self.error = error

    def complete(self) -> None:
        """Let those who wait go on, and the callbacks of the future run here."""
        with self._completing:
            self.queue, over, future = None, self._over, self._future
        if over is not None:
            over.set()
        if future is not None:
            self._settle(future)

    def will_wait(self, queue: "OperationQueue") -> None:
        """Say that it is carried out later, by a queue."""
        self.queue, self._over = queue, threading.Event()

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
        """Return a future of the tensors that the operation writes."""
        with self._completing:
            future, is_over = self._future, self.queue is None
            if future is None:
                future = self._future = Future()
                if not is_over:
                    return future
            else:
                return future
        self._settle(future)
        return future

    def result(self) -> Any:
        """Return the tensors that the operation writes."""
        return self._result

    def synchronize(self) -> None:
        """Do what ``wait`` does."""
        self.wait()

    def _settle(self, future: Future[Any]) -> None:
        if self.error is None:
            future.set_result(self._result)
        elif isinstance(self.error, Exception):
            future.set_exception(self.error)
        else:  # a future takes nothing else
            future.set_exception(RuntimeError(f"{self.name} was broken off: {self.error!r}"))


class _Several(Operation):
    """Operations that were started, and are waited for together."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait for each."""
        if self._function is not None:
            self.carry_out()
        return super().wait(timeout)

    def get_future(self) -> Future[Any]:
        """Return a future of what they write; waits for it."""
        self.wait()
        return super().get_future()


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

    def run(self, operation: Operation) -> None:
        """Carry out one whose caller waits for it."""
        if self._is_here:
            operation.carry_out()
            operation.complete()
        elif self._num_waiting == 0 and self._turn.acquire(blocking=False):
            try:
                operation.carry_out()
            finally:
                self._turn.release()
            operation.complete()
        else:
            self.start(operation)
            operation.wait()

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

    @property
    def _is_here(self) -> bool:
        return threading.current_thread() is self._thread

    def _serve(self) -> None:
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
    ) -> None:
        """Take a transfer of the wire; ``after`` is called when it is complete.

        ``lock`` is held whenever the wire is asked: several threads may have messages on it.
        """
        super().__init__()
        self._wire, self._transfer, self._tensors = wire, transfer, list(tensors)
        self._after, self._lock = after, lock
        self._is_over = False

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - the group's counts
        """Return when it is complete; sleep meanwhile."""
        if not self.is_completed():
            self._wire.wait_for(self._transfer, self.is_completed)
        return True

    def is_completed(self) -> bool:
        """Say whether it is complete."""
        with self._lock:
            if not self._is_over and self._wire.is_finished(self._transfer):
                self._is_over = True
                self._after()
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
