"""Ring all-reduce between nodes: every rank sends and receives 2(N-1)/N of the message."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hpctrain.comm.dtypes import bytes_of
from hpctrain.comm.waiting import wait_request
from hpctrain.comm.work import Check

if TYPE_CHECKING:
    from mpi4py import MPI


def ring_allreduce_(comm: "MPI.Intracomm", tensor: Tensor, check: Check) -> None:
    """Replace a flat, contiguous ``tensor`` by its sum over ``comm``.

    Collective. Part p of N travels the ring from rank p on and is summed in that order, so every
    rank ends with the same bits. 16-bit floats are rounded at each of the N-1 additions.

    Source: Patarasu and Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
    workstations".
    """
    size, rank = comm.size, comm.rank
    if size == 1:
        return
    numel = tensor.numel()
    parts = [tensor[i * numel // size : (i + 1) * numel // size] for i in range(size)]
    inbox = torch.empty(-(-numel // size), dtype=tensor.dtype)

    def exchange(outgoing: Tensor, incoming: Tensor) -> None:
        arriving = comm.Irecv(bytes_of(incoming), (rank - 1) % size)
        leaving = comm.Isend(bytes_of(outgoing), (rank + 1) % size)
        wait_request(arriving, check)
        wait_request(leaving, check)

    for step in range(size - 1):  # reduce-scatter: afterwards part rank+1 is complete here
        mine = parts[(rank - step - 1) % size]
        exchange(parts[(rank - step) % size], inbox[: mine.numel()])
        mine.add_(inbox[: mine.numel()])
    for step in range(size - 1):  # all-gather
        exchange(parts[(rank - step + 1) % size], parts[(rank - step) % size])
