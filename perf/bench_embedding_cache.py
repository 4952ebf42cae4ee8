"""Copies of frequent rows between nodes: bytes that ``cache_steps`` saves, and its effect on loss.

    python perf/bench_embedding_cache.py [--rates 200mbit 1gbit] [--json FILE]

Four ranks on two virtual nodes, joined by links of a set rate, train the network of
``examples/clicks`` on its log: without copies, with copies that are valid until the next step, for
one step and for four. The variants are interleaved and use the same batches. The program needs
root; ``python -m tests.cluster.vcluster`` reports whether it works on this machine.

* ``loss`` is the mean of the last ``LAST`` steps, ``test loss`` the loss of other lines, with
  exact rows;
* ``hit rate`` is the fraction of rows of the larger table that were found in a copy during
  training; ``kB saved`` is the number of bytes per step that copies saved, over all nodes;
  ``kB out`` is the number of bytes per step that the busier node sent, by the counters of its
  network adapter;
* ``step ms`` is the median time of a step on the slowest rank;
* ``again ms`` is the time of a second look-up of the test lines, without a step between.
"""

import argparse
import json
import sys
import tempfile
import time
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
VARIANTS: dict[str, dict[str, int]] = {"none": {}} | {
    f"{steps}": {"cache_rows": 50_000, "cache_steps": steps} for steps in (0, 1, 4)
}


class Variant:
    """Network with one setting of copies, trained interleaved with the others."""

    def __init__(self, hvd: Any, dim: int, how: dict[str, int]) -> None:
        import clicks  # noqa: PLC0415 - next to the examples

        self.hvd, self.model = hvd, clicks.model(NUM_IDS, dim, **how)
        optimizer = torch.optim.Adam(self.model.parameters(), lr=0.002)
        self.optimizer = hvd.DistributedOptimizer(optimizer, self.model.named_parameters())
        for table in (self.model.wide, self.model.deep):
            table.step_with(self.optimizer)
        self.losses: list[float] = []
        self.seconds: list[float] = []
        self.sent: list[int] = []

    def loss_of(self, log: Any, mine: Any) -> torch.Tensor:
        """Return the mean loss of lines of the log. Collective."""
        logits, clicked = (torch.from_numpy(log[name][mine]) for name in ("ids", "click"))
        return torch.nn.functional.binary_cross_entropy_with_logits(self.model(logits), clicked)

    def step(self, log: Any, mine: Any) -> None:
        """Train the network with one batch of lines."""
        self.optimizer.zero_grad()
        loss = self.loss_of(log, mine)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())

    def timed_step(self, log: Any, mine: Any) -> None:
        """Run ``step``, and measure its time and bytes."""
        from network_job import sent_bytes  # noqa: PLC0415 - takes MPI

        before = sent_bytes()
        self.seconds.append(self.timed(lambda: self.step(log, mine)))
        self.sent.append(sent_bytes() - before)

    def timed(self, work: Any) -> float:
        """Return the seconds that the slowest rank takes for a call. Collective."""
        comm = self.hvd.current().comm
        comm.barrier()
        began = time.perf_counter()
        work()
        return max(comm.allgather_object(time.perf_counter() - began))

    @torch.no_grad()
    def figures(self, log: Any, mine: Any) -> dict[str, float]:
        """Test the network, and return the results of the variant. Collective."""
        report, comm = self.model.deep.cache_report()[0], self.hvd.current().comm
        self.model.eval()
        test_loss = self.loss_of(log, mine).item()
        again = [self.timed(lambda: self.loss_of(log, mine)) for _ in range(5)]
        losses = comm.allgather_object((np.mean(self.losses[-LAST:]), test_loss))
        return {
            "loss": float(np.mean(losses, axis=0)[0]),
            "test loss": float(np.mean(losses, axis=0)[1]),
            "hit rate": report.hit_rate,
            "kB saved": report.bytes_saved / 1e3 / len(self.seconds),
            "kB out": max(comm.allgather_object(float(np.mean(self.sent)))) / 1e3,
            "step ms": 1e3 * median(self.seconds),
            "again ms": 1e3 * median(again),
        }


def job(json_file: Path, dim: int) -> None:
    """Train with all variants, interleaved, on the ranks of a cluster. Collective."""
    import clicks  # noqa: PLC0415 - next to the examples

    import hpctrain as hvd  # noqa: PLC0415 - takes MPI

    hvd.init()
    torch.set_num_threads(1)
    train, test = (clicks.log_of(n, NUM_IDS, seed) for seed, n in ((0, LINES), (1, TEST_LINES)))
    variants = {name: Variant(hvd, dim, how) for name, how in VARIANTS.items()}
    random = np.random.default_rng(0)
    lines = np.concatenate([random.permutation(LINES) for _ in range(EPOCHS)])
    for at in range(0, len(lines) - BATCH, BATCH):
        for variant in variants.values():
            variant.timed_step(train, lines[at + hvd.rank() : at + BATCH : hvd.size()])
    mine = np.arange(hvd.rank(), TEST_LINES, hvd.size())
    found = {name: variant.figures(test, mine) for name, variant in variants.items()}
    if hvd.rank() == 0:
        json_file.write_text(json.dumps({"machine": machine(), "ways": found}), encoding="utf-8")


def run(rate: str, dim: int, timeout_s: float) -> dict[str, Any]:
    """Run the job on a separate cluster."""
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
    """Run all jobs; print and write the results."""
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
