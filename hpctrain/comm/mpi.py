"""Flat MPI: every operation is one call of the library over all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

import torch
from mpi4py import MPI
from mpi4py.util import pkl5
from torch import Tensor

from hpctrain.comm.agreement import raise_if_any
from hpctrain.comm.bucket import Bucket
from hpctrain.comm.dtypes import buffer_of, bytes_of, summed_as
from hpctrain.comm.waiting import wait_request
from hpctrain.comm.work import FINISHED, Check, Work
from hpctrain.errors import CommError

T = TypeVar("T")

CHUNK_ELEMENTS = 1 << 26
"""Largest message in elements: counts of MPI-3 are 32-bit, and a widened copy stays small."""


def _never_lost(partner: int | None = None) -> None:
    """Look for nobody: the check of communicators that are used without a world."""


class MpiCommunicator:
    """All ranks of an MPI communicator; see ``Communicator`` for the methods.

    The ranks meet in a non-blocking barrier before each blocking call. While they wait for a late
    one they sleep, and notice when it died; the call itself then runs at the library's full speed.
    """

    def __init__(self, comm: MPI.Intracomm, *, check: Check = _never_lost) -> None:
        self._comm = comm
        self._objects = pkl5.Intracomm(comm)  # out-of-band pickles: no limit of 2 GiB
        self._check = check
        self.rank: int = comm.rank
        self.size: int = comm.size

    def allreduce_(self, tensor: Tensor | Bucket, *, scale: float | None = None) -> Work:
        """Sum with the library's algorithm, in chunks."""
        flat = tensor.flat if isinstance(tensor, Bucket) else tensor
        check(flat, scale)
        wide = summed_as(flat.dtype)
        self.meet()
        with flattened(flat) as values:
            for chunk in values.split(CHUNK_ELEMENTS):
                total = chunk.to(wide)
                self._comm.Allreduce(MPI.IN_PLACE, buffer_of(total))
                if scale is not None:
                    total.mul_(scale)
                if total is not chunk:
                    chunk.copy_(total)
        return FINISHED

    def broadcast_(self, tensor: Tensor, root: int = 0) -> Work:
        """Broadcast the bytes of ``tensor``."""
        check_rank(root, self.size, "root")
        self.meet()
        with flattened(tensor) as values:
            for chunk in values.split(CHUNK_ELEMENTS):
                self._comm.Bcast(bytes_of(chunk), root)
        return FINISHED

    def broadcast_object(self, value: T, root: int = 0) -> T:
        """Broadcast a pickle."""
        check_rank(root, self.size, "root")
        self.meet()
        result: T = self._objects.bcast(value, root)
        return result

    def gather_object(self, value: T, root: int = 0) -> list[T] | None:
        """Gather pickles on ``root``."""
        check_rank(root, self.size, "root")
        self.meet()
        result: list[T] | None = self._objects.gather(value, root)
        return result

    def allgather_object(self, value: T) -> list[T]:
        """Gather pickles everywhere."""
        self.meet()
        result: list[T] = self._objects.allgather(value)
        return result

    def send(self, tensor: Tensor, dest: int, tag: int = 0) -> None:
        """Send the bytes of ``tensor``."""
        check_rank(dest, self.size, "dest")
        for chunk in tensor.contiguous().view(-1).split(CHUNK_ELEMENTS):
            wait_request(self._comm.Isend(bytes_of(chunk), dest, tag), partial(self._check, dest))

    def recv_(self, tensor: Tensor, source: int, tag: int = 0) -> None:
        """Receive the bytes of ``tensor``."""
        check_rank(source, self.size, "source")
        with flattened(tensor) as values:
            for chunk in values.split(CHUNK_ELEMENTS):
                wait_request(
                    self._comm.Irecv(bytes_of(chunk), source, tag), partial(self._check, source)
                )

    def barrier(self) -> None:
        """Meet."""
        self.meet()

    def agree(self, ok: bool, message: str = "") -> None:  # noqa: FBT001
        """Gather the refusals and raise them everywhere."""
        raise_if_any(self.allgather_object(None if ok else message))

    def new_bucket(self, numel: int, dtype: torch.dtype) -> Bucket:
        """Make a bucket in private memory."""
        return Bucket(torch.zeros(numel, dtype=dtype))

    def close(self) -> None:
        """Free the MPI communicator."""
        self._comm.Free()

    def meet(self) -> None:
        """Return when every rank is here; sleep meanwhile and look for lost ranks."""
        wait_request(self._comm.Ibarrier(), self._check)


def check(tensor: Tensor, scale: float | None) -> None:
    """Refuse what cannot be summed, and a factor for integers, which would round in silence."""
    summed_as(tensor.dtype)
    if tensor.device.type != "cpu":
        raise CommError(f"tensors must be on the CPU, got one on {tensor.device}; move it first")
    if scale is not None and not tensor.is_floating_point():
        raise CommError(f"scale needs a floating point tensor, got {tensor.dtype} and {scale}")


def check_rank(rank: int, size: int, name: str) -> None:
    """Refuse a rank that the communicator does not have."""
    if not 0 <= rank < size:
        raise CommError(f"{name} must be a rank from 0 to {size - 1}, got {rank}")


@contextmanager
def flattened(tensor: Tensor) -> Iterator[Tensor]:
    """Give the elements of a tensor of any layout as a flat one, and put changes back."""
    values = tensor.detach().contiguous().view(-1)
    yield values
    if values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values.view(tensor.shape))
