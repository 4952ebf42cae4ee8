"""Checks of arguments of communicators, and conversions of tensors to 1-D."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hpctrain.core.errors import CommError
from hpctrain.core.libc import memory_at
from hpctrain.core.torch_compat import increment_version
from hpctrain.core.units import listed


def check_tensor(tensor: Tensor) -> None:
    """Raise ``CommError`` unless the tensor is dense and on the CPU."""
    if not tensor.is_cpu:
        raise CommError(f"tensors must be on the CPU, got one on {tensor.device}; move it first")
    if tensor.layout is not torch.strided:
        raise CommError(f"tensors must be dense, got {tensor.layout}; call to_dense() first")


_PLAIN = torch.Tensor, torch.nn.Parameter  # classes whose values are stored at ``data_ptr``


def is_plain(tensor: Tensor) -> bool:
    """Return whether the elements are in host memory, in row-major order, without gaps."""
    return (
        tensor.__class__ in _PLAIN
        and tensor.is_cpu
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_conj()
    )


def check_scale(tensor: Tensor, scale: float | None) -> None:
    """Call ``check_tensor``; raise ``CommError`` if an integer tensor has a ``scale``."""
    check_tensor(tensor)
    if scale is None:
        return
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise CommError(
            f"scale must be used with a floating-point or complex tensor, got "
            f"{name_of(tensor.dtype)} and {scale}; convert the tensor first"
        )


def check_rank(rank: int, size: int, name: str) -> None:
    """Raise ``CommError`` unless ``rank`` is a rank of a communicator of ``size`` ranks."""
    if not 0 <= rank < size:
        raise CommError(f"{name} must be a rank from 0 to {size - 1}, got {rank}")


def check_group(ranks: Sequence[int], size: int) -> None:
    """Raise ``CommError`` unless ``ranks`` are one or more different ranks below ``size``."""
    if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(size)):
        raise CommError(
            f"a group must have one or more ranks from 0 to {size - 1}, each once, "
            f"got {listed(ranks)}"
        )


def part_numels(numel: int, size: int, numels: Sequence[int] | None) -> list[int]:
    """Return the number of elements of each rank: ``numels``, or almost equal numbers.

    Almost equal numbers differ by at most one.

    Raises:
        CommError: ``numels`` does not divide ``numel`` elements among ``size`` ranks.
    """
    if numels is None:
        return [numel // size + (rank < numel % size) for rank in range(size)]
    if len(numels) != size or min(numels) < 0 or sum(numels) != numel:
        raise CommError(
            f"numels must be {size} integers of at least 0, one per rank, with the sum {numel}, "
            f"got {list(numels)}"
        )
    return list(numels)


def check_alltoall(tensors: Sequence[Tensor], size: int) -> None:
    """Raise ``CommError`` unless there is one tensor per rank, all of one dtype."""
    dtypes = sorted({name_of(tensor.dtype) for tensor in tensors})
    if len(tensors) != size or len(dtypes) != 1:
        raise CommError(
            f"alltoall must have {size} tensors of one dtype, got {len(tensors)} of {dtypes}; "
            f"pass an empty tensor for a rank that receives nothing"
        )


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype without ``torch.``."""
    return str(dtype).removeprefix("torch.")


def flat_of(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as a 1-D tensor, in the same memory if possible."""
    if tensor.stride() == (1,) and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach() if tensor.requires_grad else tensor
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # view(-1) keeps any stride of fewer than two elements, and cannot then change the dtype.
    return dense.as_strided((dense.numel(),), (1,))


def host_bytes(tensor: Tensor) -> memoryview:
    """Return the elements of a tensor as bytes in host memory, in row-major order.

    The result is a writable view if the tensor is contiguous and on the host, otherwise a copy.
    The memory exists as long as the result. Unlike with ``Tensor.numpy``, the storage can still be
    resized, as FSDP does.
    """
    flat = flat_of(tensor).cpu()
    if not flat.numel():
        return memoryview(bytearray())
    memory = memory_at(flat.data_ptr(), flat.nbytes)
    memory.owner = flat  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


@contextmanager
def flattened(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the elements of a tensor as a 1-D tensor; copy changes back at the end."""
    values = flat_of(tensor)
    yield values
    copy_back(values, tensor)


@contextmanager
def on_host(tensor: Tensor) -> Iterator[Tensor]:
    """Yield a tensor in host memory; copy changes back at the end."""
    values = tensor.detach().cpu()
    yield values
    if values.device != tensor.device:
        tensor.detach().copy_(values)


def copy_back(values: Tensor, tensor: Tensor) -> None:
    """Copy ``values``, the changed result of ``flat_of``, to ``tensor``.

    If they share memory, only record for autograd that ``tensor`` was changed.
    """
    if values is tensor or values.data_ptr() == tensor.data_ptr():
        increment_version((tensor,))
    else:
        tensor.detach().copy_(values.view(tensor.shape))
