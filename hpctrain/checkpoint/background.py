"""Background saves: a copy of the state in memory, and a thread that writes the copy."""

import logging
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.checkpoint.format.state_hash import is_dense
from hpctrain.checkpoint.format.state_tree import flatten, unflatten
from hpctrain.checkpoint.replicas import Checksum, checksums
from hpctrain.checkpoint.saving import divided
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.device import device_of
from hpctrain.comm.mpi_library import calls_from_threads
from hpctrain.core.units import MIB

T = TypeVar("T")

_LOG = logging.getLogger(__name__)

_PINNED_BYTES = MIB
"""Copies of at least this size are in pinned memory; smaller ones would share a page."""


class StateCopy:
    """A copy of a state in CPU memory; later copies of equal shapes reuse the memory.

    Each rank copies only its share of the replicated tensors, but computes the checksums of all
    replicated tensors. The memory of the copies stays allocated for the next ``take``.
    """

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._copies: dict[str, Tensor] = {}
        self.num_bytes = 0  # copied by the last ``take``
        self.checksums: dict[str, Checksum] = {}  # checksums of the last state, for ``SaveSource``
        self.compare_s = 0.0  # seconds that the checksums took

    def take(self, state: Any, source_rank: int | None = None) -> Any:
        """Copy a state to CPU memory, overwrite the last copy, and return the copied state.

        In the copy, elements of replicated tensors that other ranks write are not initialized.
        With ``source_rank``, that rank writes all replicated tensors. Raises
        ``CheckpointError``: the state contains an unsupported type; the last copy is unchanged.
        """
        leaves, skeleton = flatten(state)
        # Divide the tensors among the ranks as the save does.
        parts = divided(leaves, self._num_ranks, source_rank)
        held, self._copies = self._copies, {}  # free the copies of tensors that this state lacks
        self.num_bytes = 0
        copies: dict[str, Tensor | TensorPiece] = {}
        for path, leaf in leaves.items():
            if isinstance(leaf, TensorPiece):
                whole = Shard.whole(leaf.tensor.shape)
                copies[path] = TensorPiece(
                    self._copied(path, leaf.tensor, whole, held), leaf.shard
                )
            else:
                copies[path] = self._copied(path, leaf, parts[path].get(self._rank), held)
        began, self.checksums = time.perf_counter(), {}
        if self._num_ranks > 1 and source_rank is None:
            self.checksums = checksums(leaves)
        self.compare_s = time.perf_counter() - began
        tensors = (
            leaf.tensor if isinstance(leaf, TensorPiece) else leaf for leaf in leaves.values()
        )
        for place in {each.device for each in tensors if not each.is_meta}:
            if (device := device_of(place)) is not None:
                device.current_stream().synchronize()
        return unflatten(skeleton, copies.__getitem__)

    def _copied(
        self, path: str, tensor: Tensor, part: Shard | None, held: dict[str, Tensor]
    ) -> Tensor:
        if not is_dense(tensor):
            return tensor  # the write raises the error
        if part is None:
            return torch.empty((), dtype=tensor.dtype).expand(
                tensor.shape
            )  # memory of one element
        copy, here = held.get(path), Shard.whole(part.global_shape).slices(part)
        num_bytes = part.numel * tensor.itemsize
        if copy is None or copy.shape != tensor.shape or copy.dtype != tensor.dtype:
            # Pages outside the part are never written, so the kernel never allocates them.
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            device = device_of(tensor.device)
            if device is not None and num_bytes >= _PINNED_BYTES:
                device.pin(copy[here], copy, device.new_event())  # ``take`` waits for all copies
        self._copies[path] = copy
        copy[here].copy_(tensor.detach()[here], non_blocking=True)
        self.num_bytes += num_bytes
        return copy


class BackgroundWriter(Generic[T]):
    """Runs jobs in a thread with a separate communicator, or immediately if it has no thread.

    Construction creates the thread and its communicator, and is collective. Jobs run immediately
    if ``background`` is false, or if the MPI library does not allow calls from two threads; rank 0
    logs a warning in the second case.
    """

    def __init__(self, comm: Communicator, *, background: bool) -> None:
        self._comm = comm
        self._running: Future[T] | None = None
        self._thread: ThreadPoolExecutor | None = None
        if background and _allowed(comm):
            own = comm.group(range(comm.size))
            assert own is not None, "a group of all ranks contains this rank"
            self._comm = own
            self._thread = ThreadPoolExecutor(1, "hpctrain-checkpoint")

    @property
    def at_once(self) -> bool:
        """Whether there is no thread, so that ``start`` returns only after the job has ended."""
        return self._thread is None

    def start(self, job: Callable[[Communicator], T]) -> None:
        """Start a job, which may be collective.

        The previous job must have been joined. The argument of ``job`` is the communicator that it
        must use. ``join`` raises the errors of the job.
        """
        assert self._running is None, "the caller must join a job before it starts another"
        if self._thread is not None:
            self._running = self._thread.submit(job, self._comm)
            return
        self._running = Future()
        try:
            self._running.set_result(job(self._comm))
        except Exception as error:  # join() raises it, as from the thread
            self._running.set_exception(error)

    def settle(self) -> None:
        """Wait for the job in flight. A later ``join`` returns its result or raises its error."""
        if self._running is not None:
            futures.wait([self._running])

    def join(self) -> T | None:
        """Wait for the job in flight and return its result; None without a job. Not collective.

        Raises:
            Exception: the error of the job, once.
        """
        running, self._running = self._running, None
        return None if running is None else running.result()

    def close(self) -> None:
        """End the thread after its job, and free its communicator; idempotent."""
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
            self._comm.close()


def _allowed(comm: Communicator) -> bool:
    if comm.size == 1 or all(comm.allgather_object(calls_from_threads())):
        return True
    if comm.rank == 0:
        _LOG.warning(
            "the MPI library must support calls from several threads to write checkpoints in the "
            "background, but supports calls from one thread only; training waits for each "
            "checkpoint"
        )
    return False
