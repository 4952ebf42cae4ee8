"""Empirical risk: the gradient of a mean loss is a sum, so that ranks can share it out.

    hpctrain launch -n 2 -- python examples/tour/01_empirical_risk.py

What training makes small is the mean loss over n examples. Its gradient is the mean of n
gradients, whoever computes them: each rank adds up those of its shard, and one sum over the ranks
is the gradient of the whole set. The shards here are of unequal length and sorted by class, as
data often are. Then the mean of the shards' means is something else, and a frequent mistake.
"""

import torch
from claim import claim
from torch import Tensor
from torch.nn.functional import cross_entropy

import hpctrain as hvd

NUM_EXAMPLES, NUM_FEATURES, NUM_CLASSES = 1000, 20, 5


def mean_gradient(weights: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """Return the gradient of the mean loss over some examples."""
    leaf = weights.clone().requires_grad_()
    cross_entropy(x @ leaf, y).backward()
    return leaf.grad


def main() -> None:
    """Compare the gradient over all examples with two ways to put it together from shards."""
    hvd.init()
    random = torch.Generator().manual_seed(0)  # the same on every rank
    x = torch.randn(NUM_EXAMPLES, NUM_FEATURES, generator=random, dtype=torch.float64)
    y = torch.randint(NUM_CLASSES, (NUM_EXAMPLES,), generator=random).sort().values
    weights = torch.randn(NUM_FEATURES, NUM_CLASSES, generator=random, dtype=torch.float64)
    whole = mean_gradient(weights, x, y)

    # Rank r has r + 1 parts of all: with two ranks a third of the examples, and two thirds.
    rank, size = hvd.rank(), hvd.size()
    begin, end = (NUM_EXAMPLES * r * (r + 1) // (size * (size + 1)) for r in (rank, rank + 1))
    mine = mean_gradient(weights, x[begin:end], y[begin:end])

    summed = hvd.allreduce(mine * (end - begin), op=hvd.Sum) / NUM_EXAMPLES
    error = (summed - whole).abs().max().item()
    claim(
        f"gradients of shards ({size} here), weighted by their lengths, are that of all examples, "
        f"to {error:.0e}",
        holds=error < 1e-15,
    )
    if size > 1:
        mean_of_means = hvd.allreduce(mine, op=hvd.Average)
        off = ((mean_of_means - whole).norm() / whole.norm()).item()
        claim(f"without weights their mean is off by {off:.0%}", holds=off > 0.05)


if __name__ == "__main__":
    main()
