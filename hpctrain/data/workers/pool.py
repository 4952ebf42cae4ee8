"""Read and transform samples in processes: for decoding that holds Python's lock.

Reading alone is faster in the loader's threads: a process costs a copy more.
"""

import math
import os
import queue
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import nullcontext
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.order.draws import begin_generators, refused_draws
from hpctrain.data.samples import file_of
from hpctrain.data.transform import OnSample, PerSample, Transform, apply
from hpctrain.data.workers.processes import Processes
from hpctrain.data.workers.shm_message import Inbox, ShmMessage

if TYPE_CHECKING:
    from hpctrain.data.samples import Columns, Samples

TIMEOUT_S = 300.0
"""How long a worker may take for a batch; ranks that wait for it give up after 600 s."""
START_S = 120.0
"""How long the first start may take at least, from a file system that is cold."""
_NAMED = 5
"""Samples and files that an error names."""


class DecodePool:
    """Processes that take samples and transform them; the tensors come back without a copy.

    Safe beside MPI and threads: nothing forks in this process, and the others never run the
    user's script. What the script defines travels by value, all else is imported by its name.

    ``submit`` may be called from several threads. A worker that dies, takes too long, or cannot
    load the data set or the transform, fails every batch that is not there yet.
    """

    def __init__(
        self,
        dataset: "Samples",
        transform: Transform | None,
        num_workers: int,
        timeout_s: float = TIMEOUT_S,
        *,
        any_ranks: bool = False,
    ) -> None:
        """Start the processes and return; they load while this process goes on.

        Args:
            dataset: what to read; each worker opens it for itself.
            transform: makes the batch from what ``dataset.take`` returns; None for that itself.
            num_workers: processes, at least 1, each with one thread of torch.
            timeout_s: how long a worker may take for a batch, or to load; ``inf`` for ever. One
                that takes longer is ended.
            any_ranks: refuse a transform whose random numbers depend on the number of ranks: one
                of whole batches that draws from a global generator.

        Raises:
            DataError: data set or transform cannot be pickled, or no process can be started.
        """
        task = _pickled(_Task(dataset, transform, any_ranks))
        self._tasks: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._processes = Processes(num_workers)
        self._end = weakref.finalize(self, _end, self._processes, self._tasks, os.getpid())
        for number in range(num_workers):
            threading.Thread(
                target=_drive,
                args=(_Driver(self._processes, number, dataset, timeout_s), task, self._tasks),
                name=f"hpctrain-decode-{number}",
                daemon=True,
            ).start()

    def submit(self, indices: ArrayLike, epoch: int, seed: int) -> "Future[Columns]":
        """Let a worker take and transform samples; random numbers begin with (seed, epoch, them).

        The result is the batch, or what ``take`` or the transform raised, with its traceback in a
        note, or a DataError that names the worker that died or was ended, and where it stood.

        Raises:
            DataError: the pool was closed.
        """
        future: Future[Columns] = Future()
        with self._closing:
            if not self._end.alive:
                raise DataError("the decode pool was closed; make another one")
            self._tasks.put(_Request(future, np.asarray(indices, np.int64), epoch, seed))
        return future

    def close(self) -> None:
        """End all workers; what is not there yet fails. Harmless the second time."""
        with self._closing:
            self._end()


class _Request(NamedTuple):
    future: "Future[Any]"
    indices: NDArray[np.int64]
    epoch: int
    seed: int


class _Task(NamedTuple):
    """What a worker does with a request."""

    dataset: "Samples"
    transform: Transform | None
    any_ranks: bool = False

    def __call__(
        self,
        indices: NDArray[np.int64],
        epoch: int,
        seed: int,
        on_sample: OnSample | None = None,
    ) -> Any:
        def begin(index: int) -> None:
            if on_sample is not None:
                on_sample(index)
            begin_generators(np.array([index]), epoch, seed)

        columns = self.dataset.take(indices)
        if isinstance(self.transform, PerSample):
            return self.transform.at(columns, indices, epoch, seed, begin)
        part = "whose numbers would be others on another number of ranks"
        with refused_draws(part) if self.any_ranks else nullcontext():
            return apply(self.transform, columns, indices, epoch, seed)


class _Driver:
    """The rank's side of one worker."""

    def __init__(
        self, processes: Processes, number: int, dataset: "Samples", timeout_s: float
    ) -> None:
        self.processes = processes
        self._number, self._dataset, self._timeout_s = number, dataset, timeout_s
        self._worker, self._inbox = processes.workers[number], Inbox()

    def load(self, task: bytes) -> None:
        """Let the worker load what it does."""
        self._answer(max(self._timeout_s, START_S), lambda: "its start")
        self._worker.send_bytes(task)
        answer = self._answer(self._timeout_s, lambda: "loading data set and transform")
        if answer != "ready":
            raise _remote(*answer)

    def ask(self, request: _Request) -> Any:
        """Return the batch that the worker makes."""
        if self.processes.error is not None:
            raise self.processes.error
        worker, inbox = self._worker, self._inbox
        offered, surplus = inbox.offer()
        worker.send((offered, surplus, request.indices, request.epoch, request.seed))
        answer = self._answer(self._timeout_s, lambda: self._work(request.indices))
        if not isinstance(answer, ShmMessage):
            inbox.take_back(offered)
            raise _remote(*answer)
        descriptor = reduction.recv_handle(worker) if answer.new_bytes else None
        try:
            return inbox.unpack(answer, offered, descriptor)
        finally:
            if descriptor is not None:
                os.close(descriptor)

    def told(self, error: BaseException) -> BaseException:
        """Return the error, or what the end of a connection means for the whole pool."""
        if isinstance(error, (EOFError, ConnectionError)):
            return self.processes.error or self.processes.fail(
                self.processes.death_of(self._number)
            )
        return error

    def _answer(self, limit_s: float, work: Callable[[], str]) -> Any:
        if not self._worker.poll(None if limit_s == math.inf else limit_s):
            raise self.processes.fail(self.processes.abort(self._number, limit_s, work()))
        return self._worker.recv()

    def _work(self, indices: NDArray[np.int64]) -> str:
        """Name the sample that the worker is at, or those of its batch, and their files."""
        sample = self.processes.notes[self._number].sample
        found = indices.tolist() if sample is None else [sample]
        files = dict.fromkeys(filter(None, (file_of(self._dataset, each) for each in found)))
        where = f" ({_some(files)})" if files else ""
        return f"sample{'s' * (len(found) != 1)} {_some(found)}{where}"


def _drive(driver: _Driver, task: bytes, tasks: "queue.SimpleQueue[_Request | None]") -> None:
    """Serve requests with one worker until the pool is closed; afterwards fail them."""
    try:
        driver.load(task)
    except BaseException as error:  # raised by every batch
        driver.processes.fail(driver.told(error))
    while (request := tasks.get()) is not None:
        if not request.future.set_running_or_notify_cancel():
            continue
        try:
            result = driver.ask(request)
        except BaseException as error:  # raised by the batch
            request.future.set_exception(driver.told(error))
        else:
            request.future.set_result(result)
            del result
        del request


def _some(names: Iterable[object]) -> str:
    shown = list(map(str, names))
    rest = f" and {len(shown) - _NAMED} more" if len(shown) > _NAMED else ""
    return f"{', '.join(shown[:_NAMED])}{rest}"


def _remote(error: Exception, text: str) -> Exception:
    error.add_note(f"(in a decode worker)\n{text}")
    return error


def _pickled(task: _Task) -> bytes:
    try:
        return bytes(cloudpickle.dumps(task))
    except Exception as error:
        raise DataError(
            f"data set and transform go to other processes, so they must pickle, but: {error}; "
            f"leave out what does not (open files, locks, generators), or transform in threads: "
            f"workers=0"
        ) from error


def _end(processes: Processes, tasks: "queue.SimpleQueue[_Request | None]", owner: int) -> None:
    if os.getpid() != owner:  # a forked child ends nothing of its parent
        return
    processes.end()
    for _ in processes.workers:
        tasks.put(None)
