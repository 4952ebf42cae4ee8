"""Trade-offs: the gradient noise scale determines the useful number of ranks.

    hpctrain launch -n 2 -- python examples/tour/10_trade_offs.py

More ranks allow a larger batch, and a larger batch makes more progress per step. The noise scale N
is the variance of the gradient of one example divided by the squared norm of the gradient. With
the optimal learning rate, a batch of B makes 1 / (1 + N / B) of the progress of the full gradient:
half at B = N. Far below N, twice the ranks save nearly half of the steps. At N they save a
quarter, for 1.5 times the node-hours; far above N they save nothing.

Ranks estimate N without extra communication, from the squared norms of their gradients and of the
average.

Source: McCandlish et al. 2018, arXiv:1812.06162.
"""

import torch
from claim import claim
from torch import Tensor

import hpctrain as hvd

DIM, NOISE, NUM_DRAWS = 100, 2.0, 300
POINT = torch.full((DIM,), 0.5, dtype=torch.float64)  # the gradient of |x|^2 / 2 there
TRUE_SCALE = DIM * NOISE**2 / POINT.square().sum().item()  # 16 examples


def gradients(batch: int, random: torch.Generator) -> Tensor:
    """Return mean gradients of ``batch`` examples, ``(NUM_DRAWS, DIM)``."""
    shape = NUM_DRAWS, batch, DIM
    noise = NOISE * torch.randn(shape, generator=random, dtype=torch.float64)
    return POINT + noise.mean(dim=1)


def main() -> None:
    """Estimate the noise scale, then measure the progress of steps with batches around it."""
    hvd.init()
    size = hvd.size()
    random = torch.Generator().manual_seed(hvd.rank())

    # Two micro-batches on each rank, and the average over all ranks.
    first, second = gradients(8, random), gradients(8, random)
    small, large = 8, 16 * size
    average = hvd.allreduce((first + second) / 2)
    of_small = hvd.allreduce((first.square() + second.square()).sum(dim=1).mean() / 2).item()
    of_large = average.square().sum(dim=1).mean().item()
    variance = (of_small - of_large) / (1 / small - 1 / large)
    squared = (large * of_large - small * of_small) / (large - small)
    scale = variance / squared
    claim(
        f"batches of {small} and {large} give a noise scale of {scale:.1f}: it is {TRUE_SCALE:g}",
        holds=abs(scale / TRUE_SCALE - 1) < 0.1,
    )

    best = POINT.square().sum().item() / 2
    progress = []
    for wanted in (TRUE_SCALE / 4, TRUE_SCALE, 2 * TRUE_SCALE, 16 * TRUE_SCALE):
        share = max(1, round(wanted / size))
        batch = share * size
        rate = 1 / (1 + TRUE_SCALE / batch)
        steps = rate * hvd.allreduce(gradients(share, random))
        progress.append(1 - (POINT - steps).square().sum(dim=1).mean().item() / 2 / best)
        claim(
            f"a batch of {batch}: {progress[-1]:.1%} of the best progress, by theory {rate:.1%}",
            holds=abs(progress[-1] - rate) < 0.03,
        )
    gain = progress[2] / progress[1]
    claim(
        f"from N on, twice the ranks get {gain:.2f} times as far in a step: "
        f"{2 / gain:.1f} times the node-hours",
        holds=abs(gain - 4 / 3) < 0.1,
    )


if __name__ == "__main__":
    main()
