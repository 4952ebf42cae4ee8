"""Mini-batch SGD: gradients of some examples are unbiased, and the step size limits their noise.

    hpctrain launch -n 2 -- python examples/tour/02_mini_batch.py

The gradient of a mini-batch is unbiased, and its variance decreases as 1 / batch, so ranks can
divide a batch. The effect of noise is shown for the parabola x^2 / 2, whose gradient x has noise
of variance 1. With a fixed step s, E[x^2] converges to s / (2 - s), which a larger batch reduces.
With steps a / t, E[x^2] decreases as a^2 / (2a - 1) / t. Each rank simulates its part of 4000
runs.

Source: Robbins and Monro 1951; Bottou, Curtis and Nocedal 2018, arXiv:1606.04838.
"""

import torch
from claim import claim
from torch import Tensor

import hpctrain as hvd

NUM_RUNS = 4000  # of all ranks together


def mean_over_ranks(value: Tensor) -> float:
    """Return the mean over the runs of all ranks."""
    return hvd.allreduce(value.mean()).item()


def main() -> None:
    """Test the claims about batches, fixed steps and decreasing steps."""
    hvd.init()
    random = torch.Generator().manual_seed(hvd.rank())
    num_runs = NUM_RUNS // hvd.size()

    # Least squares: row i of `gradients` is the gradient of example i.
    x = torch.randn(500, 10, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    gradients = x * (x.sum(dim=1, keepdim=True) - 3.0)
    spread = gradients.var(dim=0, correction=0).sum().item()
    for batch in (1, 16):
        drawn = torch.randint(500, (num_runs, batch), generator=random)
        estimates = gradients[drawn].mean(dim=1) - gradients.mean(dim=0)
        bias = hvd.allreduce(estimates.mean(dim=0)).square().sum().item()
        variance = mean_over_ranks(estimates.square().sum(dim=1))
        share = variance / spread
        claim(
            f"a batch of {batch} is unbiased, and has 1 / {1 / share:.1f} of the variance",
            holds=abs(share * batch - 1) < 0.1 and bias < 4 * variance / NUM_RUNS,
        )

    for step, batch in ((0.4, 1), (0.1, 1), (0.1, 4)):
        points = torch.zeros(num_runs, dtype=torch.float64)
        squares = []
        for number in range(300):
            noise = torch.randn(num_runs, generator=random, dtype=torch.float64) / batch**0.5
            points -= step * (points + noise)
            if number >= 100:
                squares.append(points.square().mean())
        floor, expected = mean_over_ranks(torch.stack(squares)), step / (2 - step) / batch
        claim(
            f"steps of {step} with a batch of {batch} stop at {floor:.4f}, theory {expected:.4f}",
            holds=abs(floor / expected - 1) < 0.02,
        )

    for a in (1.0, 2.0):
        points = torch.ones(num_runs, dtype=torch.float64)
        for number in range(1, 2001):
            noise = torch.randn(num_runs, generator=random, dtype=torch.float64)
            points -= a / number * (points + noise)
        scaled, expected = 2000 * mean_over_ranks(points.square()), a**2 / (2 * a - 1)
        claim(
            f"steps of {a:g} / t: t E[x^2] = {scaled:.3f} after 2000, by theory {expected:.3f}",
            holds=abs(scaled / expected - 1) < 4 * (2 / NUM_RUNS) ** 0.5,
        )


if __name__ == "__main__":
    main()
