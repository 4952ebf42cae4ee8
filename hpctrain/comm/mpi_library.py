"""The MPI library of this process: version, thread level, all-reduce, and finalization."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from hpctrain.comm import mpi_start
from hpctrain.comm.ops import Op
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.core.errors import CommError

if TYPE_CHECKING:
    from mpi4py import MPI

_TYPES = {
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.uint8, torch.uint16, torch.uint32, torch.uint64),
}
_OPS = {op: op.name for op in Op} | {Op.PRODUCT: "PROD"}

LEVELS = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
"""Thread levels of MPI, from a single thread to concurrent calls of all threads."""


def version() -> str:
    """Return the library's version, such as ``Open MPI v5.0.11``; loads MPI. Not collective."""
    line = mpi_start.MPI.Get_library_version().strip("\0 \n").splitlines()[0]
    return " ".join(line.partition(",")[0].split())


def thread_level() -> str:
    """Return the thread level that was granted, one of ``LEVELS``. Not collective."""
    granted = mpi_start.MPI.Query_thread()
    return next(level for level in LEVELS if getattr(mpi_start.MPI, f"THREAD_{level}") == granted)


def calls_from_threads() -> bool:
    """Return whether threads of this process may call MPI concurrently. Not collective.

    Returns True if MPI is not loaded, as in a world of one rank.
    """
    if "mpi4py.MPI" not in sys.modules:
        return True
    return mpi_start.MPI.Query_thread() == mpi_start.MPI.THREAD_MULTIPLE


class BeforeFinalize:
    """Calls a function when ``MPI_Finalize`` begins, while MPI is still usable.

    ``MPI_Finalize`` first deletes the attributes of ``MPI_COMM_SELF``, which calls their delete
    callbacks.

    Args:
        function: called unless ``close`` was called before.
    """

    def __init__(self, function: Callable[[], object]) -> None:
        self._function: Callable[[], object] | None = function
        self.is_over = False  # whether the function was called
        self._key: int | None = mpi_start.MPI.Comm.Create_keyval(delete_fn=self._on_delete)
        mpi_start.MPI.COMM_SELF.Set_attr(self._key, self)

    def close(self) -> None:
        """Remove the function. A no-op the second time and after ``MPI_Finalize``."""
        self._function = None
        if self._key is not None and not mpi_start.MPI.Is_finalized():
            key, self._key = self._key, None
            mpi_start.MPI.COMM_SELF.Delete_attr(key)
            mpi_start.MPI.Comm.Free_keyval(key)

    def _on_delete(self, _comm: "MPI.Comm", _key: int, _value: object) -> None:
        self._key = None
        function, self._function = self._function, None
        if function is not None:
            self.is_over = True
            function()


class LibraryAllreduce:
    """``MPI_Allreduce`` in place over ``MPI_COMM_WORLD``, for comparison in benchmarks.

    Each call blocks. Some MPI libraries saturate small integers. The constructor is collective.

    Args:
        flat: 1-D contiguous tensor with fewer than 2^31 elements, which must exist until
            ``close``.
        op: operation.

    Raises:
        CommError: MPI cannot reduce the dtype.
    """

    def __init__(self, flat: Tensor, op: Op) -> None:
        require_type(flat.dtype)
        self._flat = flat
        self._op: mpi_start.MPI.Op = getattr(mpi_start.MPI, _OPS[op])
        kind = mpi_start.MPI.Datatype.fromcode(np.dtype(name_of(flat.dtype)).str[1:])
        values = mpi_start.MPI.buffer.fromaddress(flat.data_ptr(), flat.numel() * flat.itemsize)
        self._buffers = mpi_start.MPI.IN_PLACE, [values, flat.numel(), kind]
        self._comm = mpi_start.MPI.COMM_WORLD.Dup()

    def __call__(self) -> None:
        """Reduce ``flat`` in place. Collective."""
        self._comm.Allreduce(*self._buffers, self._op)

    def close(self) -> None:
        """Free the communicator. Collective."""
        self._comm.Free()


def require_type(dtype: torch.dtype) -> None:
    """Raise ``CommError`` if MPI cannot reduce ``dtype``."""
    if dtype not in _TYPES:
        raise CommError(
            f"MPI_Allreduce does not support {name_of(dtype)}; use float32, or omit --peers"
        )
