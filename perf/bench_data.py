"""Reading samples in random order: hpctrain, a raw map, h5py, MosaicML and webdataset.

    python perf/bench_data.py [--quick] [--json FILE] [--dir DIR]

Every method delivers the same samples, random bytes with a label, as batches of torch tensors in
one process. Warm rows read files in the page cache and report MB per second of CPU time (user and
system, all threads and children), which other load of the machine changes little. Cold rows read
files that were dropped from the page cache, which mincore confirms. The window order has to read
nearly all data before its first batch; a sequential read followed by a copy has its own row.
Before each cold measurement the program touches the free memory of the machine, so that no method
waits for memory that a virtual machine has returned to its host, which takes longer than to fill
the memory from a disk. The methods are interleaved; figures are medians over the rounds, and cold
rows have two more rounds. ``ours / way`` is the median over the rounds of the ratio within a round
(above 1 hpctrain is faster): in warm rows MB per CPU second of the second epoch, in cold rows MB
per second of the window order.

Every measurement checks the label and one byte on every page of each sample; before the
measurements, every byte of each method is compared. A slow method is stopped after some seconds,
and the time in which it fills its buffers is not counted; ``part`` is the fraction of an epoch
that it read. ``peak`` is memory in addition to the page cache. Peers that are not installed have a
row that reports this; install them with ``pip install --no-deps --target .venv-peers -r
perf/peers.txt``. The files of a set take at most 7 GB of disk and page cache (``--quick``: 1 GB,
no set of 3 GB) and are removed after its rows.
"""

import gc
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import h5py
import numpy as np
import torch
from data_memory import evict, file_system, peak_bytes, read_through, touch_free_memory
from data_methods import Hdf5, Kind, Memmap, Method, Stock, StockWorkers
from data_ours import First, FirstGlobal, FirstWindow, Second, Take
from data_peers import Mosaic, Tars, installed
from data_read_first import ReadFirst
from data_turns import Truth, Turn, check, take_turn
from measure import arguments, report

from hpctrain.core.units import MIB

BIG = Kind("150 KB", (224, 224, 3), 7000)
SMALL = Kind("3 KB", (32, 32, 3), 340_000)
LONG = {
    Kind("150 KB, 3 GB of them", BIG.shape, 20_000): (64,),
    Kind("3 KB, 3 GB of them", SMALL.shape, 1_000_000): (64, 256),
}
"""Sets of several windows, or of more than a batch is kept waiting for."""
WARM: tuple[type[Method], ...] = (Memmap, First, Second, Take, Hdf5, Stock, StockWorkers)
COLD: tuple[type[Method], ...] = (FirstWindow, FirstGlobal, Memmap, ReadFirst)
COLD_FEW: tuple[type[Method], ...] = (FirstWindow, ReadFirst)
"""Methods of hpctrain, and the lower bound of an order that mixes all samples."""
PEERS: tuple[type[Method], ...] = (Mosaic, Tars)
SEQUENTIAL = "sequential read of the same bytes"
MORE_COLD_ROUNDS = 2
TOUCHED = 7
"""Multiple of the size of a set: with that much free memory, its pages may be anywhere."""
NOT_MEASURED = "not measured"
H5PY = f"h5py {h5py.__version__}"

Turns = dict[str, list[Turn | None]]
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Plan:
    """Size of the data sets, and numbers of rounds and batches."""

    batches: Mapping[Kind, tuple[int, ...]]
    """Kinds of samples, with the batch sizes of each."""
    long: Mapping[Kind, tuple[int, ...]]
    """Kinds and batch sizes of data sets that few methods read, and only cold."""
    rounds: int
    limit_s: float
    """Time limit for an epoch of a slow method."""
    at_least_s: float
    """Least time of a measurement on files in the page cache, which repeats the epoch."""
    keep_s: float
    """Time from the last touch of free memory to a cold measurement.

    The kernel reports its host what is free 2 s after some was freed; within a turn, that halves
    it.
    """

    @classmethod
    def of(cls, options: Namespace) -> "Plan":
        """Return the plan of the command line options."""
        if options.quick:
            kinds = Kind(BIG.name, BIG.shape, 800), Kind(SMALL.name, SMALL.shape, 20_000)
            return cls({kinds[0]: (64,), kinds[1]: (64,)}, {}, 2, 0.35, 0.1, 0)
        return cls({BIG: (64,), SMALL: (64, 256)}, LONG, options.rounds, 1.8, 0.3, 2.5)


def write(kind: Kind, folder: Path, methods: Sequence[type[Method]]) -> Truth:
    """Create the samples, then the files of all methods."""
    generator = np.random.default_rng(kind.sample_bytes)
    with (folder / Memmap.form).open("wb") as raw:
        for start in range(0, kind.num_bytes, 64 * MIB):
            raw.write(generator.bytes(min(64 * MIB, kind.num_bytes - start)))
    samples = kind.map(folder / Memmap.form)
    for form, method in {method.form: method for method in methods}.items():
        method.write(kind, samples, folder / form)
    return Truth(kind, samples)


def cache(folder: Path) -> None:
    """Read all files into the page cache.

    Pages after a write may be larger than pages after a read.
    """
    gc.collect()
    evict(folder)
    read_through(folder)


def warm(methods: Sequence[Method], truth: Truth, plan: Plan) -> Turns:
    """Measure the methods, interleaved, on files in the page cache."""
    samples = truth.kind.map(methods[0].path.with_name(Memmap.form))
    for method in methods:
        check(method, samples, plan.limit_s / 4)
    turns: Turns = {method.name: [] for method in methods}
    for _ in range(plan.rounds):
        for method in methods:
            turns[method.name].append(take_turn(method, truth, plan.limit_s, plan.at_least_s))
    for method in methods:
        method.close()
    return turns


def cold(
    methods: Sequence[type[Method]], truth: Truth, folder: Path, plan: Plan, batch: int
) -> Turns:
    """Measure the methods, interleaved, on files that were dropped from the page cache.

    Returns None if the files cannot be dropped.
    """

    def turn_of(method: type[Method]) -> Turn:
        with closing(method(truth.kind, folder, batch)) as fresh:
            return take_turn(fresh, truth, plan.limit_s)

    works: dict[str, tuple[Path, Callable[[], Turn]]] = {
        # Not of our files: what we read at random leaves memory in small pieces, and a read of
        # the same files in their order then takes up to three times as long.
        SEQUENTIAL: (folder / Memmap.form, lambda: read_all(folder / Memmap.form)),
        **{method.name: (folder / method.form, partial(turn_of, method)) for method in methods},
    }
    turns: Turns = {name: [] for name in works}
    for _ in range(plan.rounds + MORE_COLD_ROUNDS):
        for name, (path, work) in works.items():
            gc.collect()  # mapped files stay in the page cache
            is_cold = evict(path)
            touch_free_memory(TOUCHED * truth.kind.num_bytes, plan.keep_s)
            turns[name].append(work() if is_cold else None)
    return turns


def read_all(path: Path) -> Turn:
    """Read a file, or the files of a folder, from start to end."""
    start, cpu_start = time.perf_counter(), time.process_time()
    num_bytes = read_through(path)
    return Turn(num_bytes, time.perf_counter() - start, time.process_time() - cpu_start, 1.0)


def rows_of(key: Row, turns: Turns, ours: str, rate: str) -> list[Row]:
    """Return the rows of a part of the table; ``rate`` names the compared figure."""
    rows = []
    for name, of_way in turns.items():
        done = [turn for turn in of_way if turn]
        pairs = [
            getattr(mine, rate) / getattr(other, rate)
            for mine, other in zip(turns[ours], of_way, strict=True)
            if mine and other
        ]
        rows.append(
            key
            | {
                "way": name,
                "part": median(turn.part for turn in done) if done else NOT_MEASURED,
                "MB/s": round(median(turn.rate for turn in done)) if done else NOT_MEASURED,
                "MB/cpu-s": round(median(t.cpu_rate for t in done)) if done else NOT_MEASURED,
                "ours / way": median(pairs) if pairs else NOT_MEASURED,
                "least": min(pairs, default=NOT_MEASURED),
                "most": max(pairs, default=NOT_MEASURED),
                "peak MiB": "",
            }
        )
    return rows


def missing_rows(key: Row, missing: Sequence[type[Method]]) -> list[Row]:
    """Return rows for the peers that are not installed."""
    columns = ("part", "MB/s", "MB/cpu-s", "ours / way", "least", "most", "peak MiB")
    empty = dict.fromkeys(columns, "")
    return [key | {"way": method.name} | empty | {"part": "not installed"} for method in missing]


def measure(kind: Kind, folder: Path, plan: Plan, peers: Sequence[type[Method]]) -> list[Row]:
    """Measure one kind of samples, warm and cold."""
    missing = [method for method in PEERS if method not in peers]
    truth = write(kind, folder, (*WARM, *peers))
    cache(folder)
    first, *_ = plan.batches[kind]
    peaks = [
        peak_bytes(method(kind, folder, first), plan.limit_s / 3) for method in (*WARM, *peers)
    ]
    rows = []
    for batch in plan.batches[kind]:
        methods = [method(kind, folder, batch) for method in (*WARM, *peers)]
        key = {"cache": "warm", "sample": kind.name, "batch": batch}
        some = rows_of(key, warm(methods, truth, plan), Second.name, "cpu_rate")
        for row, peak in zip(some, peaks if batch == first else (), strict=False):
            row["peak MiB"] = NOT_MEASURED if peak is None else round(peak / MIB)
        rows += some + missing_rows(key, missing)
        del methods
    for batch in plan.batches[kind]:
        methods = (*COLD, *peers) if batch == first else COLD_FEW
        rows += measure_cold(methods, truth, folder, plan, batch)
    return rows + missing_rows(cold_key(kind, first), missing)


def measure_cold(
    methods: Sequence[type[Method]], truth: Truth, folder: Path, plan: Plan, batch: int
) -> list[Row]:
    """Measure some methods on files that are not in the page cache."""
    turns = cold(methods, truth, folder, plan, batch)
    return rows_of(cold_key(truth.kind, batch), turns, FirstWindow.name, "rate")


def cold_key(kind: Kind, batch: int) -> Row:
    """Return the key of the cold rows of a kind of samples."""
    return {"cache": "cold", "sample": kind.name, "batch": batch}


def promises(rows: Sequence[Row]) -> dict[str, float]:
    """Return the ratios that must reach a required value, with these values."""
    wanted = {
        ("warm", BIG.name): {Memmap.name: 0.80},
        ("warm", SMALL.name): {Memmap.name: 0.60, Hdf5.name: 5, Mosaic.name: 20, Tars.name: 20},
    }
    for kind in (BIG, SMALL, *LONG):
        least = 0.80 if kind.shape == BIG.shape else 0.60
        wanted["cold", kind.name] = {SEQUENTIAL: least}
    ratios = {}
    for row in rows:
        least = wanted[row["cache"], row["sample"]].get(row["way"])
        if least is not None and isinstance(row["ours / way"], float):
            what = f"{row['cache']}, {row['sample']}, batch {row['batch']}"
            ratios[f"{what}: ours / {row['way']} (at least {least:g})"] = row["ours / way"]
    return ratios


def main() -> None:
    """Measure both kinds of samples, print the table, write the JSON file and the figure."""
    parser = arguments(__doc__.splitlines()[0])
    parser.set_defaults(rounds=3)
    parser.add_argument("--quick", action="store_true", help="fewer samples, rounds and batches")
    parser.add_argument("--dir", type=Path, help="where to make the files for the time of the run")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plan = Plan.of(options)
    versions = installed()
    peers = [method for method, version in versions.items() if version]
    rows: list[Row] = []
    for kind in (*plan.batches, *plan.long):
        with tempfile.TemporaryDirectory(prefix="bench-data-", dir=options.dir) as made:
            folder = Path(made)
            system = file_system(folder)
            if kind in plan.batches:
                rows += measure(kind, folder, plan, peers)
            else:
                truth = write(kind, folder, (FirstWindow,))
                for batch in plan.long[kind]:
                    rows += measure_cold(COLD_FEW, truth, folder, plan, batch)
    names = [f"{method.name} {version}" for method, version in versions.items() if version]
    title = f"Samples in random order from {system}; {', '.join([*names, H5PY])}"
    report(title, rows, promises(rows), options.json)


if __name__ == "__main__":
    main()
