"""Checkpoints during training: time that training waits, and time until they are on disk.

    hpctrain launch -n 2 -- python perf/bench_checkpoint.py [--mib 1024] [--dir DIR] [--json FILE]

The state is replicated: weights and two moments in tensors of 4 MiB, ``--mib`` in total. Each
round measures, one after the other, the time of the slowest rank:

* ``memory copy``: every rank copies its share of the state into memory that it has used before;
* ``stall``: ``Manager.save`` blocks the training thread;
* ``write``: the following time, in the background, until the checkpoint is on disk;
* ``comparison``: the part of ``stall`` and ``write`` for checksums of the state;
* ``dd``: one ``dd conv=fsync`` of as many bytes, from memory, into the same directory;
* ``dd on each rank``: concurrent ``dd`` of all ranks, each of its share.

The ratio compares the write with the faster ``dd``. The first save also allocates the memory and
is reported separately.
"""

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from measure import arguments, median, report
from mpi4py import MPI
from torch import Tensor

import hpctrain as hvd
from hpctrain.checkpoint.manager import Manager
from hpctrain.core.units import GIB, MIB
from hpctrain.runtime.world import current

TENSOR_BYTES = 4 * MIB
SETTLE_S = 0.5
"""Before each measurement: files that were removed are given back to the disk meanwhile."""


def make_state(num_bytes: int) -> dict[str, dict[str, Tensor]]:
    """Make the same random state on every rank, which a file system cannot compress."""
    generator = torch.Generator().manual_seed(0)
    names = [f"{index:04d}" for index in range(num_bytes // TENSOR_BYTES // 3)]
    return {
        kind: {name: torch.randn(1024, 1024, generator=generator) for name in names}
        for kind in ("weights", "first", "second")
    }


def seconds_of(work: Callable[[], object]) -> float:
    """Return the seconds that the slowest rank takes for a call. Collective."""
    current().comm.barrier()  # sleeps, where MPI's own would take a core from a rank that works
    start = time.perf_counter()
    work()
    elapsed = time.perf_counter() - start
    return max(current().comm.allgather_object(elapsed))


def dd(folder: Path, source: Path) -> None:
    """Write a copy of a file by dd, which returns when it is on disk, and remove it."""
    target = folder / f"dd-{MPI.COMM_WORLD.rank}"
    options = [f"if={source}", f"of={target}", "bs=4M", "conv=fsync", "status=none"]
    subprocess.run([shutil.which("dd"), *options], check=True)  # noqa: S603 - names of our own
    target.unlink()


def write_source(path: Path, tensors: list[Tensor]) -> None:
    """Write the bytes of tensors to a file in memory, for dd to read."""
    with path.open("wb") as file:
        for tensor in tensors:
            file.write(tensor.numpy().data)


def measure(folder: Path, num_bytes: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each kind, and the seconds of the first save. Collective."""
    comm = current().comm
    state = make_state(num_bytes)
    tensors = [tensor for of_kind in state.values() for tensor in of_kind.values()]
    mine = tensors[comm.rank :: comm.size]
    copies = [tensor.clone() for tensor in mine]
    manager = Manager(folder / "checkpoints", comm, keep=1)
    seconds: dict[str, list[float]] = {}

    def copy() -> None:
        for target, tensor in zip(copies, mine, strict=True):
            target.copy_(tensor)

    def save(step: int) -> None:
        manager.save(state, step)
        manager.wait()
        figures = manager.figures()
        first = "first " if step == 1 else ""
        seconds.setdefault(f"{first}stall", []).append(figures.stall_s)
        seconds.setdefault(f"{first}write", []).append(figures.write_s)
        seconds.setdefault(f"{first}comparison", []).append(figures.compare_s)

    def note(name: str, work: Callable[[], object]) -> None:
        settle()
        seconds.setdefault(name, []).append(seconds_of(work))

    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        one, share = Path(memory) / "one", Path(memory) / "share"
        if comm.rank == 0:
            write_source(one, tensors)
        write_source(share, mine)
        for step in range(1, rounds + 2):
            note("memory copy", copy)
            settle()
            save(step)
            note("dd", lambda: comm.rank or dd(folder, one))
            note("dd on each rank", lambda: dd(folder, share))
    manager.close()
    return seconds


def settle() -> None:
    """Wait until the disk has finished earlier writes, and synchronize. Collective."""
    if current().comm.rank == 0:
        os.sync()
        time.sleep(SETTLE_S)
    current().comm.barrier()


def main() -> None:
    """Measure, print the table, write the JSON file."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--mib", type=int, default=1024, help="size of the state")
    parser.add_argument("--dir", type=Path, default=Path.cwd() / "runs", help="on the disk to use")
    options = parser.parse_args()
    hvd.init()
    comm = current().comm
    options.dir.mkdir(parents=True, exist_ok=True)
    folder = comm.broadcast_object(
        Path(tempfile.mkdtemp(dir=options.dir)) if not comm.rank else None
    )
    try:
        seconds = measure(folder, options.mib * MIB, options.rounds)
    finally:
        if comm.rank == 0:
            shutil.rmtree(folder)
    share = options.mib * MIB / GIB
    rows = [
        {
            "what": name,
            "s (median)": median(values),
            "s (best)": min(values),
            "s (worst)": max(values),
            "GiB/s (median)": share / median(values),
        }
        for name, values in seconds.items()
    ]
    fastest = min(median(seconds["dd"]), median(seconds["dd on each rank"]))
    ratios = {
        "stall to memory copy (at most 1.3)": median(seconds["stall"])
        / median(seconds["memory copy"]),
        "speed of the write to dd (at least 0.7)": fastest / median(seconds["write"]),
        "comparison to the save (at most 0.02)": median(seconds["comparison"])
        / (median(seconds["stall"]) + median(seconds["write"])),
    }
    report(f"checkpoint of {options.mib} MiB", rows, ratios, options.json)


if __name__ == "__main__":
    main()
