"""The MPI library's own all-reduce, to be compared with ours; nothing else uses it."""

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.comm.ops import Op
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.core.errors import CommError

_TYPES = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int8: MPI.INT8_T,
    torch.int16: MPI.INT16_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.uint8: MPI.UINT8_T,
    torch.uint16: MPI.UINT16_T,
    torch.uint32: MPI.UINT32_T,
    torch.uint64: MPI.UINT64_T,
    torch.complex64: MPI.C_FLOAT_COMPLEX,
    torch.complex128: MPI.C_DOUBLE_COMPLEX,
}
_OPS = {
    Op.SUM: MPI.SUM,
    Op.PRODUCT: MPI.PROD,
    Op.MIN: MPI.MIN,
    Op.MAX: MPI.MAX,
    Op.BAND: MPI.BAND,
    Op.BOR: MPI.BOR,
    Op.BXOR: MPI.BXOR,
}


class LibraryAllreduce:
    """``MPI_Allreduce`` in place over MPI's world; each call is one blocking call of the library.

    Values are those of the library, which saturates small integers in some versions.
    """

    def __init__(self, flat: Tensor, op: Op) -> None:
        """Take the memory, which must stay as it is until ``close()``. Collective.

        Args:
            flat: 1-D and contiguous, with fewer than 2^31 elements.
            op: how values are combined.

        Raises:
            CommError: the library has no such type; on every rank.
        """
        require_type(flat.dtype)
        self._flat = flat
        self._op = _OPS[op]
        self._buffer = [
            MPI.buffer.fromaddress(flat.data_ptr(), flat.numel() * flat.itemsize),
            flat.numel(),
            _TYPES[flat.dtype],
        ]
        self._comm = MPI.COMM_WORLD.Dup()

    def __call__(self) -> None:
        """Reduce in place."""
        self._comm.Allreduce(MPI.IN_PLACE, self._buffer, self._op)

    def close(self) -> None:
        """Free the communicator."""
        self._comm.Free()


def require_type(dtype: torch.dtype) -> None:
    """Refuse what the library cannot reduce.

    Raises:
        CommError: it has no such type.
    """
    if dtype not in _TYPES:
        raise CommError(
            f"MPI_Allreduce has no {name_of(dtype)} to compare with; "
            f"take float32, or leave the comparison out"
        )
