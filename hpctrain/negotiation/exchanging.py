"""Operations that are carried out one by one: gathers, broadcasts, exchanges, barriers.

Each takes the communicator and a request, and returns its result; all are collective.
"""

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.negotiation.reducing import recipe, reduce_scatter
from hpctrain.negotiation.request import Request, Result

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


def allgather(comm: "Communicator", request: Request) -> Result:
    """Return the rows of all ranks, by rank."""
    return [_joined(comm.all_gather(tensor.detach())) for tensor in request.tensors]


def alltoall(comm: "Communicator", request: Request) -> Result:
    """Return the rows that the ranks have for this one, by rank, and how many each had."""
    rows = request.tensors[0].detach()
    splits = request.splits
    if splits is None:
        splits = [len(rows) // comm.size] * comm.size
    parts = comm.alltoall(rows[: sum(splits)].split(list(splits)))
    received = torch.tensor([len(part) for part in parts], dtype=torch.int32, device="cpu")
    return [(_joined(parts), received)]


def broadcast(comm: "Communicator", request: Request) -> Result:
    """Return the tensors of the root."""
    root = request.signature.root
    assert root is not None
    results = []
    for tensor in request.tensors:
        result = tensor
        if not request.in_place:
            given = tensor.detach()
            result = copy_of(given) if comm.rank == root else empty_like(given)
        comm.broadcast_(result, root).wait()
        results.append(result)
    return results


def reducescatter(comm: "Communicator", request: Request) -> Result:
    """Return this rank's rows of the reduced tensors; the first ranks have one more."""
    _, _, _, op, prescale, postscale, _, _ = request.signature
    assert op is not None
    results = []
    for tensor in request.tensors:
        how = recipe(tensor.dtype, op, prescale, postscale, comm.size)
        rows = [len(tensor) // comm.size + (r < len(tensor) % comm.size) for r in range(comm.size)]
        row_numel = math.prod(tensor.shape[1:])
        part = reduce_scatter(comm, tensor, [num_rows * row_numel for num_rows in rows], how)
        results.append(part.view(rows[comm.rank], *tensor.shape[1:]))
    return results


def barrier(comm: "Communicator", request: Request) -> Result:  # noqa: ARG001 - as its siblings
    """Return nothing, when all ranks are here."""
    comm.barrier()
    return []


def copy_of(tensor: Tensor) -> Tensor:
    """Return a contiguous copy."""
    return tensor.clone(memory_format=torch.contiguous_format)


def empty_like(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor of the same shape, whatever is in it."""
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _joined(parts: list[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
