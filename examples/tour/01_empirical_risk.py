"""Empirical risk: the gradient of a mean loss is a sum, which ranks can divide.

    hpctrain launch -n 2 -- python examples/tour/01_empirical_risk.py

Training minimizes the mean loss over n examples. Its gradient is the mean of n gradients: each
rank sums the gradients of its shard, and a sum over the ranks gives the gradient of the whole set.
The shards here differ in length and are sorted by class, as data often are. The mean of the means
of the shards is then a different value; using it is a frequent error.
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
    """Compare the gradient over all examples with two combinations of gradients of shards."""
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
