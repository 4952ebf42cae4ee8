"""Cost of the guards of `hpctrain train`, in CPU-seconds of the step of ``bench_step.py``.

    hpctrain launch -n 2 -- python perf/bench_guards.py [--json FILE] [--blocks N]

The step trains the ``MLP`` of that program, with 25.2 M parameters and SGD with momentum, as
`hpctrain train` does. The steps of the variants are interleaved in one process; each variant has a
separate model:

* ``bare``: the loss is not checked, samples of weights are not compared, the flight recorder
  stores no collectives, and no step is timed;
* ``guarded``: ``on_non_finite = "stop"``, ``on_spike = "skip"``, samples of weights are compared
  in each step, the flight recorder is on, and ranks exchange the times of steps every 10 steps;
* ``gradients``: the same with ``on_non_finite = "skip"``, which also checks the summed gradients.

All variants have the thread that detects stalls, which wakes up once a second.

A block is 10 pairs of steps in alternating order; its CPU-seconds are summed over all threads of
all ranks. ``more`` is the median over blocks of the difference from ``bare``, ``95 %`` is its
one-sided upper bound by order statistics. ``check_replicas`` hashes all weights and the optimizer
state: the program measures this call separately, and counts it once in 1000 steps. If ``FILE`` has
results of the same machine, the new blocks are added to the old ones.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from bench_step import BATCH, WIDTH
from measure import arguments, machine, report
from mpi4py import MPI

import hpctrain as hvd
from hpctrain.comm.flight_recorder import CallStream
from hpctrain.data import ShardedDataset, write_arrays
from hpctrain.runtime.world import current
from hpctrain.train.finite import StepGuard
from hpctrain.train.load_config import load
from hpctrain.train.loop import train_step
from hpctrain.train.metrics import Metrics
from hpctrain.train.run_state import RunState
from hpctrain.train.task import build

STEPS, CHECK_EVERY, NUM_CHECKS = 10, 1000, 7
GUARDS = {
    "bare": ["train.on_non_finite=ignore"],
    "guarded": ["train.on_spike=skip"],
    "gradients": ["train.on_non_finite=skip", "train.on_spike=skip"],
}
Pairs = list[tuple[float, float]]
"""CPU-seconds of a bare step and of another, in each block."""


def data(comm, folder: str) -> tuple[ShardedDataset, ShardedDataset]:
    """Return the batch of this rank."""
    if comm.rank == 0:
        random = np.random.default_rng(0)
        x, y = random.standard_normal((2, BATCH * comm.size, WIDTH)).astype(np.float32)
        write_arrays(Path(folder), {"x": x, "y": y}, samples_per_shard=len(x))
    comm.barrier()
    dataset = ShardedDataset.open(folder, comm)
    return dataset, dataset


class Variant:
    """Variant of the step, with a separate task."""

    def __init__(self, name: str, folder: Path) -> None:
        """Build the task. Collective."""
        self.is_bare = name == "bare"
        words = ["model.target=bench_step:mlp", "data.target=bench_guards:data"]
        words += [f"data.args.folder={folder}/{name}", "loss.target=mse_loss", "test.metric=loss"]
        words += ["optimizer.args.momentum=0.9", "optimizer.lr=1e-3", *GUARDS[name]]
        words.append(f"train.global_batch={BATCH * hvd.size()}")
        self.task = build(load(None, words).config, current().comm)
        self.state = RunState(task=self.task)
        self.guard = StepGuard(self.task, Metrics(None), self.state.guard)
        self.batch, self.number = next(iter(self.task.train)), 0
        if self.is_bare:
            self.task.optimizer._exchange.steps._check_weights = "off"  # noqa: SLF001

    def step(self) -> None:
        """Run one step as the loop of ``hpctrain train`` does."""
        task, tally = self.task, self.state.tally
        self.number += 1
        self.guard.begin(self.number, 1e-3, 0)
        start = time.perf_counter()
        loss, num_samples, is_taken = train_step(task, self.batch, self.guard)
        if self.is_bare:
            return
        work_s, communication_s = time.perf_counter() - start, task.exchange.communication_seconds
        times = {"work_s": work_s, "communication_s": communication_s}
        tally.add(loss=loss, num_samples=num_samples, num_skipped=int(not is_taken), **times)
        self.guard.end()
        if self.number % STEPS == 0:
            tally.take(task.comm)


@contextmanager
def unrecorded() -> Iterator[None]:
    """Disable the flight recorder inside the block."""
    begin, CallStream.begin = CallStream.begin, lambda *_: None
    try:
        yield
    finally:
        CallStream.begin = begin


def cpu_seconds(work: Callable[[], object]) -> float:
    """Return the CPU time of a call on this rank, in all threads."""
    before = time.process_time()
    work()
    return time.process_time() - before


def measured(bare: Variant, other: Variant, num_blocks: int, limit_s: float) -> Pairs:
    """Return CPU-seconds of a step of all ranks together, for each block. Collective."""
    sums, begun, done = np.zeros((num_blocks, 2)), time.monotonic(), 0
    for block in range(num_blocks):
        if MPI.COMM_WORLD.bcast(time.monotonic() - begun > limit_s):
            break
        done += 1
        for turn in range(STEPS):
            for which in (0, 1) if (block + turn) % 2 else (1, 0):
                MPI.COMM_WORLD.Barrier()
                with nullcontext() if which else unrecorded():
                    sums[block, which] += cpu_seconds((bare, other)[which].step)
    MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, sums)
    return [(one, two) for one, two in (sums[:done] / STEPS).round(7).tolist()]


def upper(values: Sequence[float]) -> float:
    """Return the upper 95 % confidence bound of the median, which needs about ten values."""
    ordered, count = sorted(values), len(values)
    return ordered[min(count - 1, math.ceil(count / 2 + 1.645 * math.sqrt(count) / 2))]


def kept(file: Path | None) -> dict[str, Pairs]:
    """Return the blocks of a result file of this machine; empty for another file."""
    if file is None or not file.exists():
        return {}
    found = json.loads(file.read_text())
    facts = {name: value for name, value in machine().items() if name != "date"}
    same = all(found["machine"].get(name) == value for name, value in facts.items())
    return found["blocks"] if same else {}


def rows_of(blocks: dict[str, Pairs], check_s: float) -> list[dict[str, Any]]:
    """Return a row for each kind of step, with and without ``check_replicas``."""
    rows: list[dict[str, Any]] = []
    for name, pairs in blocks.items():
        bare = median(one for one, _ in pairs)
        more = [two - one for one, two in pairs]
        for what, add in (("", 0.0), (" + check_replicas", check_s / CHECK_EVERY)):
            middle, most = median(more) + add, upper(more) + add
            rows.append(
                {
                    "step": f"{name}{what}",
                    "pairs": STEPS * len(pairs),
                    "bare CPU ms": bare * 1e3,
                    "more ms": middle * 1e3,
                    "more %": middle / bare * 100,
                    "95 % below %": most / bare * 100,
                }
            )
    return rows


def main() -> None:
    """Measure, print the table, write the JSON file."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=200, help=f"of {STEPS} pairs of steps")
    parser.add_argument("--seconds", type=float, default=math.inf, help="no blocks after that")
    parser.add_argument("--of", choices=[*GUARDS][1:], default="guarded", help="what is measured")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as own:
        folder = Path(current().comm.broadcast_object(own))
        bare, other = (Variant(name, folder) for name in ("bare", options.of))
        for variant in (bare, other) * 3:
            variant.step()
        pairs = measured(bare, other, options.blocks, options.seconds)
        checks = [cpu_seconds(other.task.exchange.check_replicas) for _ in range(NUM_CHECKS)]
        check_s = MPI.COMM_WORLD.allreduce(median(checks))
    blocks = kept(options.json)
    blocks[options.of] = [*blocks.get(options.of, []), *pairs]
    rows = rows_of(blocks, check_s)
    both = {f"{row['step']} / bare": row for row in rows if "check" in row["step"]}
    ratios = {name: 1 + row["more %"] / 100 for name, row in both.items()}
    spreads = {name: (ratios[name], 1 + row["95 % below %"] / 100) for name, row in both.items()}
    title = f"Guards of a step; check_replicas takes {check_s * 1e3:.0f} ms"
    report(title, rows, ratios, options.json, spreads)
    if options.json and hvd.rank() == 0:
        found = json.loads(options.json.read_text())
        found |= {"check_replicas_s": check_s, "blocks": blocks}
        options.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
