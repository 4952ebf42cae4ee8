"""Copies of frequent rows between nodes: what ``cache_steps`` saves, and what it costs in loss.

    python perf/bench_embedding_cache.py [--rates 200mbit 1gbit] [--json FILE]

Four ranks on two virtual nodes, joined by links of a set rate, train the network of
``examples/clicks`` on its log: first without copies, then with those that count until the next
step, for one and for four. All see the same batches. That takes root, and ``python -m
tests.cluster.vcluster`` says whether it works here.

* ``loss`` is that of the last ``LAST`` steps, ``test loss`` that of other lines, with exact rows;
* ``hit rate`` is that of the larger table while training, ``kB saved`` did not travel for it
  in a step, over all nodes; ``kB out`` left the busier node in a step, by its card's counters;
* ``step ms`` is the median time of a step, that of the slowest rank;
* ``again ms`` is the time of looking the test lines up once more, without a step in between.
"""

import argparse
import json
import sys
import tempfile
import time
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import machine, median
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
sys.path += [str(ROOT), str(ROOT / "examples/clicks")]

NUM_IDS, LINES, TEST_LINES, BATCH, EPOCHS, LAST = 100_000, 200_000, 20_000, 2048, 2, 40
WAYS = {"none": {}} | {
    f"{steps}": {"cache_rows": 50_000, "cache_steps": steps} for steps in (0, 1, 4)
}


def job(json_file: Path, dim: int) -> None:
    """Train in each way, on the ranks of a cluster. Collective."""
    import hpctrain as hvd  # noqa: PLC0415 - takes MPI

    hvd.init()
    torch.set_num_threads(1)
    found = {name: trained(hvd, dim, how) for name, how in WAYS.items()}
    if hvd.rank() == 0:
        json_file.write_text(json.dumps({"machine": machine(), "ways": found}), encoding="utf-8")


def trained(hvd: Any, dim: int, how: dict[str, int]) -> dict[str, float]:
    """Train, test, and return what was measured. Collective."""
    import clicks  # noqa: PLC0415 - beside the examples
    from network_job import sent_bytes  # noqa: PLC0415 - takes MPI

    comm = hvd.current().comm
    model = clicks.model(NUM_IDS, dim, **how)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.002)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    for table in (model.wide, model.deep):
        table.step_with(optimizer)
    train, test = (clicks.log_of(n, NUM_IDS, seed) for seed, n in ((0, LINES), (1, TEST_LINES)))
    random, losses = np.random.default_rng(0), []
    lines = np.concatenate([random.permutation(LINES) for _ in range(EPOCHS)])

    def loss_of(log: Any, mine: Any) -> torch.Tensor:
        logits = model(torch.from_numpy(log["ids"][mine]))
        clicked = torch.from_numpy(log["click"][mine])
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, clicked)

    def timed(work: Any) -> float:
        comm.barrier()
        began = time.perf_counter()
        work()
        return max(comm.allgather_object(time.perf_counter() - began))

    def step(at: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(train, lines[at + hvd.rank() : at + BATCH : hvd.size()])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())

    before = sent_bytes()
    starts = range(0, len(lines) - BATCH, BATCH)
    times = [timed(partial(step, at)) for at in starts]
    sent, report = (sent_bytes() - before) / len(times), model.deep.cache_report()[0]
    with torch.no_grad():
        model.eval()
        mine = np.arange(hvd.rank(), TEST_LINES, hvd.size())
        test_loss = loss_of(test, mine).item()
        again = [timed(lambda: loss_of(test, mine)) for _ in range(3)]
    means = np.mean(comm.allgather_object((np.mean(losses[-LAST:]), test_loss)), axis=0)
    return {
        "loss": means[0],
        "test loss": means[1],
        "hit rate": report.hit_rate,
        "kB saved": report.bytes_saved / 1e3 / len(times),
        "kB out": max(comm.allgather_object(sent)) / 1e3,
        "step ms": 1e3 * median(times),
        "again ms": 1e3 * median(again),
    }


def run(rate: str, dim: int, timeout_s: float) -> dict[str, Any]:
    """Run the job on a cluster of its own."""
    from tests.cluster.vcluster import VirtualCluster  # noqa: PLC0415 - not on its ranks

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "figures.json"
        words = ["python", str(Path(__file__).resolve()), "--job", "--json", str(file)]
        words += ["--dims", str(dim)]
        with VirtualCluster(nodes=2, rate=rate) as cluster:
            done = cluster.run(words, ranks_per_node=[2, 2], timeout_s=timeout_s)
        if done.returncode:
            raise SystemExit(f"{rate} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
        figures: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        return figures


def main() -> None:
    """Run all jobs; print and write what they measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", nargs="+", default=["200mbit", "1gbit"], help="of the links")
    parser.add_argument("--dims", nargs="+", default=[16, 64], type=int, help="of rows")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds that a job may take")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    parser.add_argument("--job", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.job:
        job(options.json, options.dims[0])
        return
    results = []
    for rate, dim in product(options.rates, options.dims):
        figures = run(rate, dim, options.timeout)
        results.append({"rate": rate, "dim": dim, **figures})
        shown = Table(title=f"{BATCH} lines a step, 2 nodes of 2 ranks, {rate}, rows of {dim}")
        for head in ("cache_steps", *figures["ways"]["none"]):
            shown.add_column(head, justify="right")
        for name, row in figures["ways"].items():
            shown.add_row(name, *(f"{value:.4g}" for value in row.values()))
        Console(width=120, height=50).print(shown)
    if options.json:
        options.json.write_text(
            json.dumps({"results": results}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
