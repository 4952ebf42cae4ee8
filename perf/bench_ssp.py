"""Bounded staleness with ranks that are slow at random: steps per second for each bound.

    hpctrain launch -n 8 -- python perf/bench_ssp.py [--json FILE]

Each step sleeps 20 ms, or 200 ms in 5 % of the steps of each rank, drawn at random, and then calls
the parameter servers, which run on all ranks, with a model of 20,000 parameters. Ranks that sleep
need no cores, so there may be more ranks than cores. All bounds are interleaved and use the same
draws. ``simulated`` has the same draws without communication: step c of a rank starts when its own
previous step and step c - staleness - 1 of the slowest rank have ended.

``async`` is ``AsyncSGD``, whose ranks do not wait for other ranks. The slow rank changes; a rank
that is always slow slows all ranks down with any bound.
"""

import time
from typing import Any

import numpy as np
import torch
from measure import arguments, interleave, median, report
from torch import nn

import hpctrain as hvd

SHORT_S, LONG_S, CHANCE = 0.020, 0.200, 0.05
BOUNDS = (0, 2, 4, 8)


class Run:
    """Steps with one bound of staleness, or None for ``AsyncSGD``, with the sleeps of a round."""

    def __init__(self, bound: int | None, num_steps: int) -> None:
        """Build the model and its method."""
        self.bound, self.num_steps, self.turn, self.most = bound, num_steps, 0, 0
        self.model = nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.simulated: list[float] = []

    def __call__(self) -> None:
        """Run all steps of a round."""
        sleeps = draws(self.turn, self.num_steps)
        self.turn += 1
        self.simulated.append(simulated_s(sleeps, self.bound))
        for p in self.model.parameters():
            p.grad = torch.ones_like(p)
        if self.bound is None:
            method: Any = hvd.AsyncSGD(self.model, self.optimizer)
        else:
            method = hvd.StaleSynchronous(self.model, self.optimizer, self.bound)
        with method:
            for sleep_s in sleeps[:, hvd.rank()]:
                time.sleep(float(sleep_s))
                self.optimizer.step()
        self.most = max([self.most, *method.total_histogram()])


def draws(turn: int, num_steps: int) -> np.ndarray:
    """Draw the seconds that each rank sleeps in each step."""
    slow = np.random.default_rng(turn).random((num_steps, hvd.size())) < CHANCE
    return np.where(slow, LONG_S, SHORT_S)


def simulated_s(sleeps: np.ndarray, bound: int | None) -> float:
    """Return the time of all steps without the cost of communication."""
    ends = np.zeros((len(sleeps) + 1, sleeps.shape[1]))
    for step, of_ranks in enumerate(sleeps):
        begins = ends[step]
        if bound is not None and step >= bound:
            begins = np.maximum(begins, ends[step - bound].max())
        ends[step + 1] = begins + of_ranks
    return float(ends[-1].max())


def main() -> None:
    """Measure all bounds, interleaved, print the table, write the JSON file."""
    parser = arguments(__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100, help="steps of each rank in each turn")
    options = parser.parse_args()
    hvd.init()
    torch.set_num_threads(1)
    runs = {f"staleness {s}": Run(s, options.steps) for s in BOUNDS}
    runs["async"] = Run(None, options.steps)
    seconds = interleave(runs, rounds=options.rounds, warm_up=0)
    base = seconds["staleness 0"]
    rows, ratios = [], {}
    for name, times in seconds.items():
        of_turns = [slow / fast for slow, fast in zip(base, times, strict=True)]
        simulated = runs["staleness 0"].simulated
        expected = [a / b for a, b in zip(simulated, runs[name].simulated, strict=True)]
        row = {
            "bound": name,
            "steps/s": options.steps / median(times),
            "/ staleness 0": median(of_turns),
            "simulated": median(expected),
            "staleness met": runs[name].most,
        }
        rows.append(row)
        ratios[f"{name} / staleness 0"] = row["/ staleness 0"]
    report("bounded staleness where ranks stumble", rows, ratios, options.json)
    hvd.shutdown()


if __name__ == "__main__":
    main()
