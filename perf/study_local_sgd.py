"""Local SGD: loss against the interval of averaging.

    hpctrain launch -n 4 -- python perf/study_local_sgd.py [--quick] [--json FILE]

There are two tasks, each with three seeds for the weights and for the order of the samples: digits
of scikit-learn with a small network and SGD with momentum, and the text of the standard library of
Python with the small transformer of ``examples/text.py`` and AdamW. All methods take the same
number of steps, on the same samples, with the same learning rates, which rise at first and then
decrease to 0; only the number of steps between two averagings differs. The state of the optimizer
stays local. ``away`` is the difference of the mean figure from that of synchronous training. The
result is worse if ``away`` is above ``Task.allowed`` and above twice the standard error over equal
seeds.
"""

import argparse
import gc
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import machine
from mpi4py import MPI
from rich.console import Console
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))

import text

import hpctrain as hvd
from hpctrain.runtime.world import current

WORLD = MPI.COMM_WORLD
SEEDS = (0, 1, 2)
NUM_TEST = 360


@dataclass(frozen=True, kw_only=True)
class Task:
    """Task: data, model, optimizer, loss and test."""

    title: str
    figure: str
    """Name of the score of a trained network; lower is better."""
    allowed: float
    """Difference of this figure that does not matter."""
    steps: int
    batch: int
    """Samples of a rank and step."""
    num_samples: int
    rounds: tuple[int, ...]
    """Steps of a round of each method; 0, the first, is synchronous."""
    make: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    loss: Callable[[nn.Module, Tensor], Tensor]
    """Of the samples with these numbers."""
    test: Callable[[nn.Module], float]
    """Return ``figure``. Collective."""


def digits() -> Task:
    """Return the task with digits."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0)).numpy()
    images = torch.tensor(found.data[order] / 16, dtype=torch.float32)
    labels = torch.tensor(found.target[order])
    test_images, test_labels = (values[:NUM_TEST] for values in (images, labels))
    images, labels = images[NUM_TEST:], labels[NUM_TEST:]

    def errors(model: nn.Module) -> float:
        wrong = model(test_images).argmax(1) != test_labels
        return 100.0 * wrong.float().mean().item()

    return Task(
        title="digits, SGD with momentum",
        figure="test error, %",
        allowed=0.5,
        steps=640,
        batch=16,
        num_samples=len(labels),
        rounds=(0, 1, 4, 16, 64),
        make=lambda: nn.Sequential(
            nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        ),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        loss=lambda model, chosen: cross_entropy(model(images[chosen]), labels[chosen]),
        test=errors,
    )


def standard_library(folder: str) -> Task:
    """Make the task of the text. Collective.

    Args:
        folder: directory for the packed text, identical on every rank.
    """
    packed = text.data(current().comm, folder, 20_000, 512)
    train, test = (torch.as_tensor(part.take(range(len(part)))["bytes"]) for part in packed)

    def bits(model: nn.Module) -> float:
        mine = test[WORLD.rank :: WORLD.size]
        total = text.bits_per_byte(model(mine), mine).sum().item()
        return WORLD.allreduce(total) / len(test)

    return Task(
        title="standard library, AdamW",
        figure="bits of a byte",
        allowed=0.05 / math.log(2),
        steps=240,
        batch=8,
        num_samples=len(train),
        rounds=(0, 1, 4, 16),
        make=text.model,
        optimizer=lambda model: torch.optim.AdamW(
            model.parameters(), lr=0.004, betas=(0.9, 0.99), weight_decay=0.01
        ),
        loss=lambda model, chosen: text.loss(model(train[chosen]), train[chosen]),
        test=bits,
    )


def rate(done: float) -> float:
    """Return the fraction of the maximum learning rate: linear warm-up, then a cosine."""
    return min(10 * done + 0.01, 0.5 + 0.5 * math.cos(math.pi * done))


def train(task: Task, num_steps: int, steps_of_a_round: int, seed: int) -> dict[str, Any]:
    """Train once, with different samples on each rank, and return the results. Collective."""
    torch.manual_seed(seed)
    model = task.make()
    optimizer = task.optimizer(model)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step / num_steps))
    method = None
    if steps_of_a_round:
        method = hvd.LocalSGD(model, optimizer, steps_of_a_round)
    else:
        hvd.DistributedOptimizer(optimizer, model.named_parameters())
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    drawn = torch.Generator().manual_seed(seed)
    epoch, drift = torch.empty(0, dtype=torch.long), 0.0
    for _ in range(num_steps):
        if len(epoch) < WORLD.size * task.batch:
            epoch = torch.randperm(task.num_samples, generator=drawn)
        ours, epoch = epoch.tensor_split([WORLD.size * task.batch])
        optimizer.zero_grad()
        task.loss(model, ours[WORLD.rank :: WORLD.size]).backward()
        optimizer.step()
        schedule.step()
        drift = max(drift, method.facts["drift"]) if method else 0.0
    rounds = num_steps
    if method:
        method.finish()
        rounds = method.facts["rounds"]
        method.close()
    with torch.no_grad():
        found = task.test(model)
    del model, optimizer, method
    gc.collect()
    return {"seed": seed, "rounds": rounds, "figure": found, "drift": drift}


def study(task: Task, options: argparse.Namespace) -> dict[str, Any]:
    """Train with all methods and all seeds. Collective."""
    num_steps = 64 if options.quick else task.steps
    rows: list[dict[str, Any]] = []
    for steps in task.rounds:
        runs = [train(task, num_steps, steps, seed) for seed in SEEDS]
        figures = [run["figure"] for run in runs]
        synchronous = rows[0]["runs"] if rows else runs
        away = [own - run["figure"] for own, run in zip(figures, synchronous, strict=True)]
        rows.append(
            {
                "steps of a round": steps,
                "rounds": runs[0]["rounds"],
                "mean": statistics.mean(figures),
                "spread": statistics.stdev(figures),
                "away": statistics.mean(away),
                "standard error": statistics.stdev(away) / math.sqrt(len(SEEDS)),
                "drift": statistics.mean(run["drift"] for run in runs),
                "runs": runs,
            }
        )
    return {
        "task": task.title,
        "figure": task.figure,
        "steps": num_steps,
        "rows": rows,
        "in words": [verdict(row, num_steps, task) for row in rows[1:]],
    }


def verdict(row: Mapping[str, Any], num_steps: int, task: Task) -> str:
    """Return a sentence on whether the interval of averaging is worthwhile."""
    error = row["standard error"]
    rounds = f"rounds of {row['steps of a round']}: {row['rounds']} averagings for {num_steps}"
    away = f"{task.figure} {row['away']:+.2f} with a standard error of {error:.2f}"
    if row["rounds"] >= num_steps:
        return f"{rounds}, {away}: no time is saved, so it is not worthwhile"
    if row["away"] > task.allowed and row["away"] <= 2 * error:
        return f"{rounds}, {away}: three seeds cannot show whether the loss is worse"
    if row["away"] > task.allowed:
        return (
            f"{rounds}, but {away}: the loss is worse, so it is worthwhile only if averaging "
            "takes most of the time"
        )
    return f"{rounds}, {away}: it is worthwhile if averaging takes time"


def show(console: Console, result: Mapping[str, Any]) -> None:
    """Print a table of one task, then a summary."""
    title = f"{result['task']}: {result['steps']} steps on {WORLD.size} ranks, {len(SEEDS)} seeds"
    table = Table(title=title, title_justify="left", title_style="bold")
    for head in ("steps of a round", "rounds", result["figure"], "spread", "away", "drift"):
        table.add_column(head, justify="right")
    for row in result["rows"]:
        table.add_row(
            str(row["steps of a round"] or "synchronous"),
            str(row["rounds"]),
            f"{row['mean']:.3f}",
            f"{row['spread']:.3f}",
            f"{row['away']:+.3f}",
            f"{row['drift']:.3f}" if row["steps of a round"] else "-",
        )
    console.print(table)
    for line in result["in words"]:
        console.print(line)


def main() -> None:
    """Study both tasks; print and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few steps, to see it work")
    parser.add_argument("--json", type=Path, help="write all figures to this file")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    console = Console(width=120, height=50, highlight=False, quiet=WORLD.rank != 0)
    results = []
    with tempfile.TemporaryDirectory() as own:
        for task in (digits(), standard_library(WORLD.bcast(own))):
            results.append(study(task, options))
            show(console, results[-1])
        WORLD.Barrier()
    if options.json and WORLD.rank == 0:
        facts = json.dumps({"machine": machine(), "results": results}, indent=1)
        options.json.write_text(facts + "\n", encoding="utf-8")
    hvd.shutdown()


if __name__ == "__main__":
    main()
