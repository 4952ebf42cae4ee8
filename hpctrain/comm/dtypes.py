"""MPI's datatypes for the elements of tensors."""

import torch
from mpi4py import MPI

_MPI_TYPE = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}


def library_sums(dtype: torch.dtype) -> bool:
    """Say whether the MPI library may sum this dtype.

    Not 8 and 16 bits: Open MPI saturates vectorised sums, 245 + 245 is 255 there and not 234.
    """
    return dtype in _MPI_TYPE


def buffer_of(tensor: torch.Tensor) -> list[object]:
    """Describe a contiguous tensor that the library may sum to mpi4py, in place."""
    return [_bytes_of(tensor), tensor.numel(), _MPI_TYPE[tensor.dtype]]


def bytes_of(tensor: torch.Tensor) -> list[object]:
    """Describe a contiguous tensor of any dtype to mpi4py as plain bytes, in place."""
    return [_bytes_of(tensor), tensor.numel() * tensor.itemsize, MPI.BYTE]


def _bytes_of(tensor: torch.Tensor) -> MPI.buffer:
    # Not tensor.numpy(): that pins the storage, and bfloat16 has no numpy type.
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.itemsize)
