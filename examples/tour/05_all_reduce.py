"""All-reduce: in a ring all ranks send equally many bytes, the minimum.

    hpctrain launch -n 2 -- python examples/tour/05_all_reduce.py

A server that sums the vectors of K ranks receives K - 1 vectors and sends K - 1, so its traffic
grows with K. In a ring each rank communicates with two neighbours. In K - 1 steps it sends one
K-th of the vector, to which the next rank adds its own part; then each rank has one part of the
sum, and K - 1 more steps distribute the parts. Each rank sends 2 (K - 1) / K vectors, the minimum.
Each part is summed in one order, so the results of all ranks are bitwise equal. With two ranks the
traffic of server and ring is equal; use four to see the difference.

Source: Patarasuk and Yuan 2009, doi:10.1016/j.jpdc.2008.09.002.
"""

import torch
from claim import claim
from torch import Tensor

import hpctrain as hvd
from hpctrain.comm import Communicator

LENGTH = 27_720  # a multiple of 1 to 12


def ring(values: Tensor, comm: Communicator) -> int:
    """Replace ``values`` by their sum over the ranks; return the number of values sent."""
    rank, size, num_sent = comm.rank, comm.size, 0
    parts = values.tensor_split(size)
    for adds in (True, False):
        for step in range(size - 1):
            out = parts[(rank - step + (not adds)) % size]
            mine = parts[(rank - step - adds) % size]
            came = torch.empty_like(mine)
            # Even ranks send first and odd ranks receive first; otherwise blocking sends deadlock.
            if rank % 2 == 0:
                comm.send(out, (rank + 1) % size)
            comm.recv_(came, (rank - 1) % size)
            if rank % 2:
                comm.send(out, (rank + 1) % size)
            mine.copy_(mine + came if adds else came)
            num_sent += out.numel()
    return num_sent


def main() -> None:
    """Sum random vectors by a ring and a server; compare the traffic and the exact sum."""
    hvd.init()
    comm = hvd.current().comm
    rank, size = comm.rank, comm.size
    random = torch.Generator().manual_seed(0)
    vectors = torch.randn(size, LENGTH, generator=random, dtype=torch.float64)
    summed = vectors[rank].clone()
    sent = ring(summed, comm)
    claim(
        f"each rank of {size} has sent {sent / LENGTH:.3f} vectors, 2 (K - 1) / K",
        holds=sent * size == 2 * (size - 1) * LENGTH,
    )
    everyone = hvd.allgather(summed.unsqueeze(0))
    claim("all ranks have the same bits", holds=all(torch.equal(r, summed) for r in everyone))
    exact, ours = vectors.sum(dim=0), hvd.allreduce(vectors[rank], op=hvd.Sum)
    error = max((summed - other).abs().max().item() for other in (exact, ours))
    claim(f"it is the sum, which hvd.allreduce gives too, to {error:.0e}", holds=error < 1e-13)

    at_server, carried = vectors[rank].clone(), 0
    if rank:
        comm.send(at_server, 0)
    for source in range(1, size if rank == 0 else 0):
        comm.recv_(came := torch.empty_like(at_server), source)
        at_server += came
        carried += 2 * LENGTH  # received, and sent back below
    comm.broadcast_(at_server).wait()
    claim(
        f"a server carries {carried / LENGTH:.2f} vectors in both directions, a rank of the ring "
        f"{2 * sent / LENGTH:.2f}",
        holds=rank > 0 or carried * 2 == size * 2 * sent,
    )


if __name__ == "__main__":
    main()
