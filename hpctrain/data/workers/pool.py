"""Read and transform samples in processes, for transforms that hold Python's GIL.

Reading without a transform is faster in the loader's threads, which need one copy less.
"""

import math
import os
import queue
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from multiprocessing import reduction
from typing import TYPE_CHECKING, Any, NamedTuple

import cloudpickle  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import ArrayLike, NDArray

from hpctrain.core.checks import require_open
from hpctrain.core.errors import DataError
from hpctrain.core.python_compat import add_note
from hpctrain.core.units import shortened
from hpctrain.data.data_config import WORKER_TIMEOUT_S
from hpctrain.data.samples import file_of
from hpctrain.data.transform import (
    OnSample,
    PerSample,
    Transform,
    apply,
    begin_generators,
    refused_draws,
)
from hpctrain.data.workers.processes import Processes
from hpctrain.data.workers.shm_message import ShmMessage, unpack

if TYPE_CHECKING:
    from hpctrain.data.samples import Columns, Samples

START_S = 120.0  # minimum time limit of the start, which may import from a cold file system
_NAMED = 5  # maximum number of samples or files named in an error


class DecodePool:
    """A pool of processes that read and transform samples, and return batches in shared memory.

    The pool is safe with MPI and threads: this process does not fork, and the workers never run
    the user's script. Objects defined in the script are sent by value, all other objects are
    imported.

    Several threads may request batches concurrently; a batch is made by one worker. If a worker
    dies, exceeds its time limit, or cannot load the data set or the transform, all batches that
    are not complete fail.

    The constructor returns before the workers have loaded the data set.

    Args:
        dataset: data set to read from.
        transform: applied to the samples of a batch; None to return them unchanged.
        num_workers: number of processes.
        timeout_s: time limit for loading and for each batch; ``inf`` for no limit.
        any_ranks: whether results must not depend on the number of ranks. Then a transform of
            whole batches that draws from a global generator raises an error.

    Raises:
        DataError: data set or transform cannot be pickled, or no process can be started.
    """

    def __init__(
        self,
        dataset: "Samples",
        transform: Transform | None,
        num_workers: int,
        timeout_s: float = WORKER_TIMEOUT_S,
        *,
        any_ranks: bool = False,
    ) -> None:
        task = _pickled(_Task(dataset, transform, any_ranks))
        self._processes = Processes(num_workers)
        self._free: queue.SimpleQueue[_Worker | None] = queue.SimpleQueue()
        for number in range(num_workers):
            self._free.put(_Worker(self._processes, number, dataset, timeout_s, task))
        self._end = weakref.finalize(self, _end, self._processes, self._free, os.getpid())

    def take(self, indices: ArrayLike, epoch: int, seed: int) -> "Columns":
        """Read and transform samples in the next free worker, and wait for the batch.

        The worker seeds its global generators from seed, epoch and sample indices. Raises
        ``DataError``: the pool was closed, a worker died, or a worker exceeded its time limit. In
        the latter case, the error names the sample. Errors of the data set or the transform are
        raised unchanged, with the user's frames in a note.
        """
        worker = self._free.get()
        try:
            require_open(worker, "a decode pool", DataError)
            assert worker is not None
            return worker.ask(np.asarray(indices, np.int64), epoch, seed)
        finally:
            self._free.put(worker)

    def close(self) -> None:
        """End all workers; incomplete batches fail. Idempotent."""
        self._end()


class _Task(NamedTuple):
    """Function that a worker calls for each request: read samples and transform them."""

    dataset: "Samples"
    transform: Transform | None
    any_ranks: bool = False

    def __call__(
        self, indices: NDArray[np.int64], epoch: int, seed: int, on_sample: OnSample | None = None
    ) -> Any:
        def begin(index: int) -> None:
            if on_sample is not None:
                on_sample(index)
            begin_generators(np.array([index]), epoch, seed)

        columns = self.dataset.take(indices)
        if isinstance(self.transform, PerSample):
            return self.transform.at(columns, indices, epoch, seed, begin)
        part = "because the results would depend on the number of ranks"
        with refused_draws(part) if self.any_ranks else nullcontext():
            return apply(self.transform, columns, indices, epoch, seed)


class _Worker:
    """Connection of the rank to one worker, used by one thread at a time."""

    def __init__(
        self, processes: Processes, number: int, dataset: "Samples", timeout_s: float, task: bytes
    ) -> None:
        self._processes, self._number = processes, number
        self._dataset, self._timeout_s = dataset, timeout_s
        self._connection = processes.workers[number]
        self._task: bytes | None = task  # None after the worker has loaded the task

    def ask(self, indices: NDArray[np.int64], epoch: int, seed: int) -> "Columns":
        """Request a batch from the worker, and wait for it."""
        if self._processes.error is not None:
            raise self._processes.error
        if self._task is not None:
            self._load(self._task)
            self._task = None
        with self._connected():
            self._connection.send((indices, epoch, seed))
            answer = self._answer(self._timeout_s, lambda: self._work(indices))
            is_shared = isinstance(answer, ShmMessage) and answer.num_bytes
            descriptor = reduction.recv_handle(self._connection) if is_shared else None
        if not isinstance(answer, ShmMessage):
            raise _remote(*answer)
        batch: Columns = unpack(answer, descriptor)
        return batch

    def _load(self, task: bytes) -> None:
        with self._connected():
            self._answer(max(self._timeout_s, START_S), lambda: "the start of its process")
            self._connection.send_bytes(task)
            answer = self._answer(self._timeout_s, lambda: "loading data set and transform")
        if answer != "ready":
            raise self._processes.fail(_remote(*answer))

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Raise the error of a dead worker if the connection closes inside the block."""
        processes = self._processes
        try:
            yield
        except (EOFError, ConnectionError):
            raise processes.error or processes.fail(processes.death_of(self._number)) from None

    def _answer(self, limit_s: float, work: Callable[[], str]) -> Any:
        if not self._connection.poll(None if limit_s == math.inf else limit_s):
            raise self._processes.fail(self._processes.abort(self._number, limit_s, work()))
        return self._connection.recv()

    def _work(self, indices: NDArray[np.int64]) -> str:
        """Describe the current sample and its file, or all samples if the sample is unknown."""
        sample = self._processes.notes[self._number].sample
        found = indices.tolist() if sample is None else [sample]
        files = dict.fromkeys(filter(None, (file_of(self._dataset, each) for each in found)))
        where = f" ({shortened(files, _NAMED)})" if files else ""
        return f"sample{'s' * (len(found) != 1)} {shortened(found, _NAMED)}{where}"


def _remote(error: Exception, frames: str, whole: str) -> Exception:
    """Add the user's frames to an error as a note, and the whole traceback as its cause."""
    add_note(error, f"(in a decode worker)\n{frames}".rstrip())
    error.__cause__ = RuntimeError(f"in a decode worker:\n{whole}")
    return error


def _pickled(task: _Task) -> bytes:
    try:
        return bytes(cloudpickle.dumps(task))
    except Exception as error:
        raise DataError(
            f"data set and transform must be picklable, because they are sent to other "
            f"processes, but pickling raised: {error}; omit open files, locks and generators, or "
            f"transform in threads: workers=0"
        ) from error


def _end(processes: Processes, free: "queue.SimpleQueue[_Worker | None]", owner: int) -> None:
    if os.getpid() != owner:  # a forked child must not end the processes of its parent
        return
    processes.end()
    free.put(None)  # wakes the waiting threads one by one: each puts the None back
