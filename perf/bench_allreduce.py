"""All-reduce inside one node: ours against MPI_Allreduce, on the same kind of torch memory.

    hpctrain launch -n 2 -- python perf/bench_allreduce.py [--json FILE]

Three ways to sum float32 values of every rank into every rank's own tensor:

* ``MPI``: MPI_Allreduce in place on an ordinary tensor;
* ``bucket``: ours, on a bucket in node memory, where gradients lie anyway;
* ``tensor``: ours, on an ordinary tensor.

Ratios are the median time of MPI over ours: above 1 ours is faster. Before each timed call the
values are written anew, outside the clock; every size is checked against the exact sum.
"""

import torch
from measure import arguments, interleave, median, report
from mpi4py import MPI

import hpctrain as hvd
from hpctrain.runtime.world import current
from hpctrain.units import KIB, MIB, format_bytes

SIZES = (8, KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 100 * MIB)


def measure_size(num_bytes: int, rounds: int) -> dict[str, object]:
    """Time the three ways for one message size and check their sums."""
    comm = current().comm
    numel = max(num_bytes // 4, 1)
    bucket, tensor, plain = (
        comm.new_bucket(numel, torch.float32),
        torch.empty(numel),
        torch.empty(numel),
    )
    buffer = MPI.buffer.fromaddress(plain.data_ptr(), plain.nbytes)

    def write() -> None:
        for values in (bucket.flat, tensor, plain):
            values.fill_(comm.rank + 1)

    seconds = interleave(
        {
            "MPI": lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, [buffer, MPI.FLOAT]),
            "bucket": lambda: comm.allreduce_(bucket).wait(),
            "tensor": lambda: comm.allreduce_(tensor).wait(),
        },
        rounds=rounds,
        repetitions=3 if num_bytes >= 16 * MIB else 20,
        prepare=write,
    )
    check(write, comm, bucket, tensor)
    mpi, ours, ordinary = (median(seconds[name]) for name in ("MPI", "bucket", "tensor"))
    return {
        "size": format_bytes(num_bytes),
        "MPI ms": mpi * 1e3,
        "bucket ms": ours * 1e3,
        "tensor ms": ordinary * 1e3,
        "bucket GB/s": num_bytes / ours / 1e9,
        "MPI / bucket": mpi / ours,
        "MPI / tensor": mpi / ordinary,
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
    rows = [measure_size(size, options.rounds) for size in SIZES]
    ratios = {f"MPI / bucket, {row['size']}": row["MPI / bucket"] for row in rows}
    report(f"All-reduce, {hvd.size()} ranks on one node", rows, ratios, options.json)


if __name__ == "__main__":
    main()
