"""Which MPI datatype a tensor travels as, and what it must be widened to before it is summed."""

import torch
from mpi4py import MPI

from hpctrain.errors import CommError

_MPI_TYPE = {
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
}

_WIDER = {
    # MPI has no 16-bit floats; float32 also rounds once instead of once per rank.
    torch.float16: torch.float32,
    torch.bfloat16: torch.float32,
    # Open MPI saturates vectorised sums of 8 and 16 bits: 245 + 245 is 255 there, not 234.
    torch.int8: torch.int32,
    torch.int16: torch.int32,
    torch.uint8: torch.int32,
}


def summed_as(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` are summed by the MPI library.

    Raises:
        CommError: tensors of this dtype cannot be summed.
    """
    if dtype in _MPI_TYPE:
        return dtype
    if dtype in _WIDER:
        return _WIDER[dtype]
    known = ", ".join(str(d).removeprefix("torch.") for d in (*_MPI_TYPE, *_WIDER))
    raise CommError(
        f"a sum over ranks takes {known}, got {str(dtype).removeprefix('torch.')}; "
        f"convert the tensor first"
    )


def buffer_of(tensor: torch.Tensor) -> list[object]:
    """Describe a contiguous tensor of a summable MPI type to mpi4py, in place."""
    return [_bytes_of(tensor), tensor.numel(), _MPI_TYPE[tensor.dtype]]


def bytes_of(tensor: torch.Tensor) -> list[object]:
    """Describe a contiguous tensor of any dtype to mpi4py as plain bytes, in place."""
    return [_bytes_of(tensor), tensor.numel() * tensor.itemsize, MPI.BYTE]


def _bytes_of(tensor: torch.Tensor) -> MPI.buffer:
    # Not tensor.numpy(): that pins the storage, and bfloat16 has no numpy type.
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.itemsize)
