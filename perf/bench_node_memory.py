"""Two kinds of node memory: time to fill them and to sum in them.

    hpctrain launch -n 2 -- python perf/bench_node_memory.py [--json FILE]

* ``memfd``: the kind that hpctrain tries first;
* ``huge``: memfd with pages of 2 MiB, if the system grants them: as root,
  ``echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled``. The table shows the
  fraction of memory in such pages; if the fraction is 0, the row is a second memfd and shows the
  noise.

``fill`` copies an ordinary tensor into the segment of the rank, ``sum`` adds the slice of the rank
over all ranks and writes it back to all, in the chunks that hpctrain uses. Ratios are medians,
over the rounds, of the time of memfd over that of the other kind in the same round: above 1 the
other kind is faster.
"""

import mmap
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from measure import arguments, interleave, median, report
from mpi4py import MPI

from hpctrain.comm.bucket import CHUNK_BYTES, slice_bounds
from hpctrain.comm.node.node_memory import allocate, reserve
from hpctrain.core.units import MIB, format_bytes

SIZES = (8 * MIB, 25 * MIB, 64 * MIB)
NODE = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)


def reserve_huge(num_bytes: int) -> int:
    """Map memory with a request for huge pages; the system may provide small pages instead."""
    descriptor = os.memfd_create("huge", os.MFD_CLOEXEC)
    os.ftruncate(descriptor, num_bytes)
    with mmap.mmap(descriptor, num_bytes) as mapped:
        mapped.madvise(mmap.MADV_HUGEPAGE)
        for start in range(0, num_bytes, mmap.PAGESIZE):
            mapped[start] = 0
    return descriptor


METHODS = {"memfd": reserve, "huge": reserve_huge}


def huge_share() -> float:
    """Return the fraction of the shared memory of this process that is in huge pages."""
    sizes = {"Pss_Shmem": 0, "ShmemPmdMapped": 0}
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]:
        name, size = line.split()[:2]
        sizes[name.rstrip(":")] = int(size)
    return sizes["ShmemPmdMapped"] / max(NODE.size * sizes["Pss_Shmem"], 1)


def works(
    reserve: Callable[[int], int], num_bytes: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """Allocate a segment per rank; return functions that fill this rank's segment and sum all."""
    segments = allocate(NODE, num_bytes, reserve)
    values = [torch.frombuffer(segment, dtype=torch.float32) for segment in segments]
    source = torch.ones(num_bytes // 4)
    own = slice_bounds(source.numel(), NODE.size, NODE.rank)
    chunks = list(zip(*(v[own].split(CHUNK_BYTES // 4) for v in values), strict=True))

    def add() -> None:
        for first, *others in chunks:
            for other in others:
                first.add_(other)
            for other in others:
                other.copy_(first)

    return lambda: values[NODE.rank].copy_(source), add


def measure_size(num_bytes: int, rounds: int) -> list[dict[str, object]]:
    """Time filling and summing for one size; return one row for each kind of memory."""
    made = {name: works(reserve, num_bytes) for name, reserve in METHODS.items()}
    fills = interleave({name: fill for name, (fill, _) in made.items()}, rounds=rounds)
    sums = interleave({name: add for name, (_, add) in made.items()}, rounds=rounds)
    return [
        {
            "size": format_bytes(num_bytes),
            "way": name,
            "fill ms": median(fills[name]) * 1e3,
            "sum ms": median(sums[name]) * 1e3,
            "memfd / fill": ratio(fills, name),
            "memfd / sum": ratio(sums, name),
            "huge part of all": huge_share(),
        }
        for name in METHODS
    ]


def ratio(seconds: dict[str, list[float]], name: str) -> float:
    """Return the median over rounds of the time of memfd divided by the time of ``name``."""
    pairs = zip(seconds["memfd"], seconds[name], strict=True)
    return statistics.median(memfd / other for memfd, other in pairs)


def main() -> None:
    """Measure every size, print the table, write the JSON file."""
    options = arguments(__doc__.splitlines()[0]).parse_args()
    torch.set_num_threads(1)
    rows = [row for size in SIZES for row in measure_size(size, options.rounds)]
    ratios = {
        f"{work}, {row['way']}, {row['size']}": row[work]
        for row in rows
        if row["way"] != "memfd"
        for work in ("memfd / fill", "memfd / sum")
    }
    report(f"Node memory, {NODE.size} ranks", rows, ratios, options.json)


if __name__ == "__main__":
    main()
