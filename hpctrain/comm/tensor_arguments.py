"""Arguments of communicators: tensors, factors, ranks and parts, and their place in memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from hpctrain.core.errors import CommError
from hpctrain.core.libc import memory_at


def check_tensor(tensor: Tensor) -> None:
    """Refuse, by ``CommError``, a tensor that is not dense and on the CPU."""
    if not tensor.is_cpu:
        raise CommError(f"tensors must be on the CPU, got one on {tensor.device}; move it first")
    if tensor.layout is not torch.strided:
        raise CommError(f"tensors must be dense, got {tensor.layout}; call to_dense() first")


def check_scale(tensor: Tensor, scale: float | None) -> None:
    """Refuse what ``check_tensor`` does, and a factor that would round integers in silence."""
    check_tensor(tensor)
    if scale is None:
        return
    if not (tensor.is_floating_point() or tensor.is_complex()):
        raise CommError(
            f"scale needs a floating point or complex tensor, got {name_of(tensor.dtype)} and "
            f"{scale}; convert the tensor first"
        )


def check_rank(rank: int, size: int, name: str) -> None:
    """Refuse, by ``CommError``, a rank that the communicator does not have."""
    if not 0 <= rank < size:
        raise CommError(f"{name} must be a rank from 0 to {size - 1}, got {rank}")


def check_group(ranks: Sequence[int], size: int) -> None:
    """Refuse, by ``CommError``, no ranks, and one named twice or that does not exist."""
    if not ranks or len(set(ranks)) != len(ranks) or not set(ranks) <= set(range(size)):
        raise CommError(
            f"a group has one or more ranks from 0 to {size - 1}, each once, got {list(ranks)}"
        )


def part_numels(numel: int, size: int, numels: Sequence[int] | None) -> list[int]:
    """Return how many elements each rank gets: ``numels``, or as even as possible.

    ``CommError`` if ``numels`` does not give every rank a part of all ``numel`` elements.
    """
    if numels is None:
        return [numel // size + (rank < numel % size) for rank in range(size)]
    if len(numels) != size or min(numels) < 0 or sum(numels) != numel:
        raise CommError(
            f"numels must give {size} ranks {numel} elements in all, got {list(numels)}"
        )
    return list(numels)


def check_alltoall(tensors: Sequence[Tensor], size: int) -> None:
    """Refuse, by ``CommError``, anything but one tensor for each rank, all of one dtype."""
    dtypes = sorted({name_of(tensor.dtype) for tensor in tensors})
    if len(tensors) != size or len(dtypes) != 1:
        raise CommError(
            f"alltoall takes {size} tensors of one dtype, got {len(tensors)} of {dtypes}; "
            f"send an empty one where there is nothing"
        )


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype as users write it."""
    return str(dtype).removeprefix("torch.")


def flat_of(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor of any layout as a flat one; the same memory if possible."""
    if tensor.stride() == (1,) and not tensor.is_conj() and not tensor.is_neg():
        return tensor.detach() if tensor.requires_grad else tensor
    dense = tensor.detach().resolve_conj().resolve_neg().contiguous()
    # Not view(-1): of fewer than two elements it keeps any stride, which has no view as lanes.
    return dense.as_strided((dense.numel(),), (1,))


def host_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of the elements of a tensor, in row-major order, in host memory.

    They are the memory of the tensor, and writable, where that is contiguous and on the host;
    else a copy. The memory exists as long as the result does, and unlike that of
    ``Tensor.numpy`` its storage may still be resized afterwards, as FSDP does.
    """
    flat = flat_of(tensor).cpu()
    if not flat.numel():
        return memoryview(bytearray())
    memory = memory_at(flat.data_ptr(), flat.nbytes)
    memory.owner = flat  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


@contextmanager
def flattened(tensor: Tensor) -> Iterator[Tensor]:
    """Give the elements of a tensor of any layout as a flat one, and put changes back."""
    values = flat_of(tensor)
    yield values
    put_back(values, tensor)


@contextmanager
def on_host(tensor: Tensor) -> Iterator[Tensor]:
    """Give a tensor of the host in the place of one on any device, and put changes back."""
    values = tensor.detach().cpu()
    yield values
    if values.device != tensor.device:
        tensor.detach().copy_(values)


def put_back(values: Tensor, tensor: Tensor) -> None:
    """Write what ``flat_of`` gave into the tensor, where that is other memory."""
    if values is not tensor and values.data_ptr() != tensor.data_ptr():
        tensor.detach().copy_(values.view(tensor.shape))
