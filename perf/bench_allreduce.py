"""All-reduce inside one node: hpctrain against MPI_Allreduce and gloo, on the same torch memory.

    hpctrain launch -n 2 -- python perf/bench_allreduce.py [--json FILE]

Methods that sum float32 values of all ranks into a tensor of each rank:

* ``MPI``: MPI_Allreduce in place on an ordinary tensor;
* ``gloo``: torch.distributed over gloo, in the same processes;
* ``Horovod``: over the same MPI, if it is installed;
* ``bucket``: hpctrain, on a bucket in node memory, which stores gradients;
* ``tensor``: hpctrain, on an ordinary tensor.

Calls of the methods are interleaved. Ratios are the median time of a peer over that of hpctrain:
above 1 hpctrain is faster. Before each timed call the values are written again, outside of the
measured time. The sum of each size is compared with the exact sum.
"""

import torch
from measure import arguments, interleave, median, report
from mpi4py import MPI
from peers import Peer, library, start_gloo, start_horovod, stop_gloo
from table import spread

import hpctrain as hvd
from hpctrain.core.units import KIB, MIB, format_bytes
from hpctrain.runtime.world import current

SIZES = (8, KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 100 * MIB)


Spreads = dict[str, tuple[float, float]]


def measure_size(
    num_bytes: int, rounds: int, peers: dict[str, Peer], spreads: Spreads
) -> dict[str, object]:
    """Time all methods for one message size, check sums; note the spread of each ratio."""
    comm = current().comm
    numel = max(num_bytes // 4, 1)
    bucket, tensor = comm.new_bucket(numel, torch.float32), torch.empty(numel)
    written = [bucket.flat, tensor]

    def write() -> None:
        written.reverse()  # values written last are in a nearer cache
        for values in written:
            values.fill_(comm.rank + 1)

    variants = {name: peer(tensor) for name, peer in peers.items()} | {
        "bucket": lambda: comm.allreduce_(bucket).wait(),
        "tensor": lambda: comm.allreduce_(tensor).wait(),
    }
    repetitions = 3 if num_bytes >= 16 * MIB else 20
    seconds = interleave(variants, rounds=rounds, repetitions=repetitions, prepare=write)
    check(write, comm, bucket, tensor)
    middle = {name: median(times) for name, times in seconds.items()}
    size = format_bytes(num_bytes)
    for name in peers:
        spreads[f"{name} / bucket, {size}"] = spread(seconds[name], seconds["bucket"], rounds)
    return {
        "size": size,
        **{f"{name} ms": second * 1e3 for name, second in middle.items()},
        "bucket GB/s": num_bytes / middle["bucket"] / 1e9,
        **{f"{name} / bucket": middle[name] / middle["bucket"] for name in peers},
        **{f"{name} / tensor": middle[name] / middle["tensor"] for name in peers},
    }


def check(write, comm, bucket, tensor) -> None:
    """Stop if a sum is not exact on any rank."""
    write()
    comm.allreduce_(bucket).wait()
    comm.allreduce_(tensor).wait()
    total = comm.size * (comm.size + 1) / 2
    exact = all(bool((values == total).all()) for values in (bucket.flat, tensor))
    comm.agree(exact, "the sum is wrong")


def main() -> None:
    """Measure every size, print the table, write the JSON file."""
    options = arguments(__doc__.splitlines()[0]).parse_args()
    hvd.init()
    torch.set_num_threads(1)
    peers = {"MPI": library(MPI.COMM_WORLD), "gloo": start_gloo()}
    if horovod := start_horovod():
        peers["Horovod"] = horovod
    spreads: Spreads = {}
    rows = [measure_size(size, options.rounds, peers, spreads) for size in SIZES]
    ratios = {f"MPI / bucket, {row['size']}": row["MPI / bucket"] for row in rows}
    report(f"All-reduce, {hvd.size()} ranks on one node", rows, ratios, options.json, spreads)
    stop_gloo()


if __name__ == "__main__":
    main()
