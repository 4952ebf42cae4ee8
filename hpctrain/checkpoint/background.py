"""One job at a time beside the training, with a communicator of its own."""

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Generic, TypeVar

from hpctrain.comm.mpi_library import calls_from_threads

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

T = TypeVar("T")

_LOG = logging.getLogger(__name__)


class Beside(Generic[T]):
    """Runs jobs on a thread; where that cannot be, at once, with the communicator of all else."""

    def __init__(self, comm: "Communicator", *, background: bool) -> None:
        """Make the thread and its communicator. Collective.

        Args:
            comm: the ranks whose jobs call each other.
            background: False for jobs that run at once. So do all where the MPI library does not
                allow calls from two threads, which is said once.
        """
        self._comm = comm
        self._running: Future[T] | None = None
        self._thread: ThreadPoolExecutor | None = None
        if background and _allowed(comm):
            own = comm.group(range(comm.size))
            assert own is not None, "a group of all ranks has this one in it"
            self._comm = own
            self._thread = ThreadPoolExecutor(1, "hpctrain-checkpoint")

    @property
    def at_once(self) -> bool:
        """Whether ``start`` returns when the job is done."""
        return self._thread is None

    def start(self, job: Callable[["Communicator"], T]) -> None:
        """Run a job, which may be collective. Only after ``join``.

        Args:
            job: takes the communicator to use; its errors are raised by ``join``.
        """
        assert self._running is None, "one job at a time"
        if self._thread is not None:
            self._running = self._thread.submit(job, self._comm)
            return
        self._running = Future()
        try:
            self._running.set_result(job(self._comm))
        except Exception as error:  # join() raises it, as from the thread
            self._running.set_exception(error)

    def join(self) -> T | None:
        """Wait for the job and return its result, once; None where there is none. Not collective.

        Raises:
            Exception: what the job has raised, once.
        """
        running, self._running = self._running, None
        return None if running is None else running.result()

    def close(self) -> None:
        """End the thread after its job, and give its communicator back; harmless twice."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
            self._comm.close()


def _allowed(comm: "Communicator") -> bool:
    if comm.size == 1 or all(comm.allgather_object(calls_from_threads())):
        return True
    if comm.rank == 0:
        _LOG.warning(
            "checkpoints are not written in the background: the MPI library allows calls from one "
            "thread only; the training waits for each of them"
        )
    return False
