"""One job of ``bench_local_sgd.py``: all methods, interleaved, from the same weights and data.

A residual network of 24 x Linear(1024) with ReLU inside, 25.2 M parameters in float32, learns
scikit-learn's digits, whose 64 pixels are mixed into 1024 inputs. A step has 32 images of each
rank, the same for every method. The loss is computed on 360 images that are not used for
training, by all ranks together, when all ranks have the same model: after every round, and every
few steps with synchronous training. Measured times and counted bytes exclude this test.
"""

import argparse
import gc
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measure import machine
from mpi4py import MPI
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Optimizer

import hpctrain as hvd

WORLD = MPI.COMM_WORLD
BLOCKS, WIDTH, CLASSES = 12, 1024, 10
BATCH, NUM_TEST = 32, 360
LR = 0.02
TOLERANCE = 0.005
"""Part of the loss."""
SETTLE_S = 0.3
"""Time until late acknowledgements have left the node too."""


class Block(nn.Module):
    """Residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """Return the output, of shape ``(n, WIDTH)`` like the input."""
        result: Tensor = x + self.layers(x)
        return result


def make_model() -> nn.Sequential:
    """Return the network, with equal initial weights in every call."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(BLOCKS)), nn.Linear(WIDTH, CLASSES))
    with torch.no_grad():
        for block in list(model)[:-1]:
            block.layers[2].weight.mul_(BLOCKS**-0.5)  # the sum of all blocks stays in bounds
    return model


class Task:
    """Images of digits, divided among the ranks."""

    def __init__(self) -> None:
        digits = load_digits()
        made = torch.Generator().manual_seed(1)
        order = torch.randperm(len(digits.target), generator=made).numpy()
        pixels = torch.tensor(digits.data[order] / 8, dtype=torch.float32)
        mix = torch.randn(pixels.shape[1], WIDTH, generator=made) / 8
        inputs = (pixels - pixels[NUM_TEST:].mean(0)) @ mix
        labels = torch.tensor(digits.target[order])
        self._test = inputs[:NUM_TEST], labels[:NUM_TEST]
        self._inputs, self._labels = inputs[NUM_TEST:], labels[NUM_TEST:]

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the images and labels of this rank in a step; ranks have different images."""
        drawn = torch.Generator().manual_seed(step)
        order = torch.randperm(len(self._labels), generator=drawn)
        mine = order[WORLD.rank * BATCH : (WORLD.rank + 1) * BATCH]
        return self._inputs[mine], self._labels[mine]

    def loss(self, model: nn.Module) -> float:
        """Return the mean loss of the test images. Collective."""
        images, labels = (values[WORLD.rank :: WORLD.size] for values in self._test)
        with torch.no_grad():
            total = cross_entropy(model(images), labels, reduction="sum").item()
        return WORLD.allreduce(total) / NUM_TEST


class Synchronous:
    """Synchronous training with the interface of a local method."""

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self.optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def close(self) -> None:
        """No-op: the optimizer is discarded."""


@dataclass(frozen=True)
class Variant:
    """Method of training: constructor, and the number of steps of a round."""

    make: Callable[[nn.Module, Optimizer], Any]
    steps: int
    """Steps of a round."""


def variants(rounds: list[int]) -> dict[str, Variant]:
    """Return all methods by name.

    Args:
        rounds: numbers of steps of a round of ``LocalSGD``; other methods use the middle one.
    """
    middle = rounds[len(rounds) // 2]
    return {
        "synchronous": Variant(Synchronous, 1),
        **{
            f"LocalSGD, {steps} steps": Variant(
                lambda model, optimizer, steps=steps: hvd.LocalSGD(model, optimizer, steps), steps
            )
            for steps in rounds
        },
        f"LocalSGD, {middle} steps, bf16": Variant(
            lambda model, optimizer: hvd.LocalSGD(
                model, optimizer, middle, compression=hvd.Compression.bf16
            ),
            middle,
        ),
        f"HierarchicalLocalSGD, 1 and {middle} steps": Variant(
            lambda model, optimizer: hvd.HierarchicalLocalSGD(model, optimizer, middle), middle
        ),
        f"DiLoCo, {middle} steps": Variant(
            lambda model, optimizer: hvd.DiLoCo(model, optimizer, middle), middle
        ),
    }


def sent_bytes() -> int:
    """Return the number of bytes that all nodes sent by ``eth0``; 0 without eth0. Collective.

    No other communication may be in flight.
    """
    WORLD.Barrier()
    time.sleep(SETTLE_S)
    own = 0
    if hvd.local_rank() == 0:
        for line in Path("/proc/net/dev").read_text(encoding="ascii").splitlines():
            card, _, counters = line.partition(":")
            own += int(counters.split()[8]) if card.strip() == "eth0" else 0
    return WORLD.allreduce(own)


def train(
    variant: Variant, task: Task, options: argparse.Namespace, target: float
) -> dict[str, Any]:
    """Train until the target loss and a number of steps are reached. Collective.

    Args:
        variant: method of training.
        task: images and loss.
        options: ``steps`` is the least number of steps; the limit is twice this number.
        target: loss to reach.

    Returns:
        Key ``looks`` has for each test: number of steps, loss, and for the steps since the
        previous test ``seconds`` of the slowest rank and ``bytes`` that all nodes sent.
    """
    model = make_model()
    optimizer = SGD(model.parameters(), lr=LR)
    method = variant.make(model, optimizer)
    looks: list[dict[str, Any]] = [{"step": 0, "loss": task.loss(model)}]
    every = max(variant.steps, options.look)
    step = 0
    while step < options.steps or (looks[-1]["loss"] > target and step < 2 * options.steps):
        before, seconds = sent_bytes(), 0.0
        WORLD.Barrier()
        for _ in range(every):
            images, labels = task.batch(step)
            start = time.perf_counter()
            optimizer.zero_grad()
            cross_entropy(model(images), labels).backward()
            optimizer.step()
            seconds += time.perf_counter() - start
            step += 1
        elapsed = WORLD.allreduce(seconds, MPI.MAX)
        num_bytes = sent_bytes() - before
        looks.append(
            {"step": step, "loss": task.loss(model), "seconds": elapsed, "bytes": num_bytes}
        )
    method.close()
    return {"steps of a round": variant.steps, "looks": looks}


def main() -> None:
    """Train with all methods and write one JSON file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="steps of synchronous training")
    parser.add_argument("--rounds", type=int, nargs="+", help="steps of the rounds of LocalSGD")
    parser.add_argument(
        "--look", type=int, help="minimum number of steps between tests of the loss"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    task, found, target = Task(), {}, float("inf")
    for name, variant in variants(options.rounds).items():
        found[name] = train(variant, task, options, target)
        if name == "synchronous":
            target = found[name]["looks"][-1]["loss"] * (1 + TOLERANCE)
        gc.collect()  # buckets in node memory go with what holds them
    if WORLD.rank == 0:
        text = json.dumps({"machine": machine(), "target": target, "ways": found})
        options.json.write_text(text, encoding="utf-8")
    hvd.shutdown()


if __name__ == "__main__":
    main()
