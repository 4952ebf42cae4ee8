"""Cost of reproducible steps: against the ordinary step on the same global batch.

    hpctrain launch -n 2 -- python perf/bench_reproducible.py [--json FILE]

One thread on every rank, SGD with momentum, float32, 64 samples on every rank. Two models:
``wide``, 24 x (Linear(1024) + ReLU), 25.2 M parameters, has many gradients and little computation;
``conv``, 6 convolutions of 32 channels with BatchNorm on 32 x 32 pixels, has few gradients and
much computation.

* ``ordinary``: ``DistributedOptimizer`` with its default plan, one pass over the batch of the
  rank;
* ``M = ...``: ``Reproducible`` with M micro-shards, 1, 2, 4 and 8 times the number of ranks.

The variants are interleaved, each on its own model; the time of a step is that of the slowest
rank. ``waiting ms`` is the time in which the last step waited for other ranks after its last
backward. The program then times the hash of the model and its optimizer, ``state_hash``, on one
rank and divided among all ranks, and ``check_replicas``, in which each rank hashes all state.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from measure import arguments, interleave, median, report
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hpctrain as hvd
from hpctrain.checkpoint.format.state_hash import state_hash
from hpctrain.gradients.reproducible import Reproducible
from hpctrain.runtime.world import current

LAYERS, WIDTH, CHANNELS, PIXELS, BATCH, CLASSES = 24, 1024, 32, 32, 64, 10
SHARDS_PER_RANK = (1, 2, 4, 8)


def wide() -> tuple[nn.Module, Tensor]:
    """Return a model with many gradients, and the inputs of this rank."""
    layers = [m for _ in range(LAYERS) for m in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers), torch.randn(BATCH, WIDTH)


def conv() -> tuple[nn.Module, Tensor]:
    """Return a model with much computation, and the inputs of this rank."""
    layers: list[nn.Module] = []
    for index in range(6):
        layers += [
            nn.Conv2d(CHANNELS if index else 3, CHANNELS, 3, padding=1),
            nn.BatchNorm2d(CHANNELS),
            nn.ReLU(),
        ]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(CHANNELS, CLASSES)]
    return nn.Sequential(*layers), torch.randn(BATCH, 3, PIXELS, PIXELS)


class Job:
    """Variant of the benchmark: a model, its optimizer, and a training step."""

    def __init__(self, make: Callable[[], tuple[nn.Module, Tensor]], num_shards: int) -> None:
        """Build model and optimizer; ``micro_shards`` is 0 for an ordinary step."""
        torch.manual_seed(0)
        self.model, inputs = make()
        self.batch = inputs, torch.randint(CLASSES, (BATCH,))
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        comm = current().comm
        if num_shards:
            self.steps = Reproducible(
                self.model, self.optimizer, comm, num_micro_shards=num_shards, seed=0
            )
            self.step = partial(self.steps.step, self.batch, self.loss)
        else:
            self.optimizer = self.steps = hvd.DistributedOptimizer(
                self.optimizer, self.model.named_parameters()
            )
            self.step = self.ordinary

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the mean loss over the samples."""
        return cross_entropy(self.model(batch[0]), batch[1])

    def ordinary(self) -> float:
        """Run an ordinary step."""
        self.optimizer.zero_grad()
        loss = self.loss(self.batch)
        loss.backward()
        self.optimizer.step()
        return loss.item()

    @property
    def state(self) -> dict[str, Any]:
        """State of model and optimizer, which the program hashes."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}


def main() -> None:
    """Measure all variants, interleaved, print the table, write the JSON file."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=4, help="counted steps in each turn")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    first = 1 << (hvd.size() - 1).bit_length()  # a power of two
    counts = {"ordinary": 0} | {f"M = {first * k}": first * k for k in SHARDS_PER_RANK}
    rows, ratios = [], {}
    for model, make in (("wide", wide), ("conv", conv)):
        jobs = {name: Job(make, count) for name, count in counts.items()}
        seconds = interleave(
            {name: job.step for name, job in jobs.items()},
            rounds=options.rounds,
            repetitions=options.steps,
        )
        base = median(seconds["ordinary"])
        for name, times in seconds.items():
            waiting = MPI.COMM_WORLD.allreduce(jobs[name].steps.communication_seconds, MPI.MAX)
            rows.append(
                {
                    "model": model,
                    "step": name,
                    "median ms": median(times) * 1e3,
                    "fastest ms": min(times) * 1e3,
                    "waiting ms": waiting * 1e3,
                    "/ ordinary": median(times) / base,
                }
            )
            if name != "ordinary":
                ratios[f"{model}, {name} / ordinary"] = median(times) / base
        if model == "wide":
            ratios |= hashing(jobs["ordinary"], options.rounds)
    report("Reproducible steps", rows, ratios, options.json)
    hvd.shutdown()


def hashing(job: Job, rounds: int) -> dict[str, float]:
    """Return the rates of ``state_hash`` and ``check_replicas`` in GB/s."""
    comm, state = current().comm, job.state
    seconds = interleave(
        {
            "state_hash, alone": lambda: state_hash(state),
            "state_hash, shared": lambda: state_hash(state, comm),
            "check_replicas": lambda: hvd.check_replicas(job.model, job.optimizer),
        },
        rounds=rounds,
    )
    tensors = [
        *state["model"].values(),
        *(t for each in state["optimizer"]["state"].values() for t in each.values()),
    ]
    num_bytes = sum(t.nbytes for t in tensors if isinstance(t, Tensor))
    return {f"{name}, GB/s": num_bytes / median(times) / 1e9 for name, times in seconds.items()}


if __name__ == "__main__":
    main()
