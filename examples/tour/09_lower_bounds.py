"""Lower bounds: every method needs a number of rounds, whatever ranks compute between them.

    hpctrain launch -n 2 -- python examples/tour/09_lower_bounds.py

The loss is a chain: the first link acts on the first weight, each other link couples a weight to
the next one, and neighbouring links belong to different ranks. Starting from zero, a rank alone
can only change weights next to nonzero ones, so each round reaches one more weight. The other
weights cause an error of at least q^r after r rounds, with q = (sqrt(k) - 1) / (sqrt(k) + 1) for a
condition number k. The number of rounds is therefore at least of order sqrt(k). Nesterov's method
has this order, gradient descent needs order k, and local steps between rounds do not change it.

Source: Arjevani and Shamir 2015, arXiv:1506.01900; Nesterov's chain. Bytes have a bound as well,
which the ring of 05_all_reduce.py reaches.
"""

import torch
from claim import claim
from torch import Tensor

import hpctrain as hvd

LENGTH = 300


class Chain:
    """The loss: links of this rank, a condition number, and the optimal weights."""

    def __init__(self, condition: float) -> None:
        """Select the links of this rank, one per row of ``links``."""
        unit = torch.eye(LENGTH, dtype=torch.float64)
        links = (unit - unit.roll(1, 0).tril()) * ((condition - 1) / 4) ** 0.5
        mine = links[hvd.rank() :: hvd.size()] * hvd.size() ** 0.5
        self.condition, self.goal = condition, unit[0] * (condition - 1) / 4
        self.mine = mine.T @ mine + unit
        self.least = torch.linalg.solve(links.T @ links + unit, self.goal)
        self.q = (condition**0.5 - 1) / (condition**0.5 + 1)

    def gradient(self, weights: Tensor) -> Tensor:
        """Return the gradient of this rank; the mean over ranks is the gradient of the loss."""
        first = hvd.size() if hvd.rank() == 0 else 0  # rank 0 has the first link
        return self.mine @ weights - first * self.goal


def descend(chain: Chain, method: str, most: int, error: float) -> tuple[int, float, Tensor]:
    """Run at most this number of rounds, until the weights are within ``error`` of the optimum.

    Returns the number of rounds, the smallest ratio of the error to the bound, and the weights.
    """
    comm = hvd.current().comm
    weights, before = torch.zeros(2, LENGTH, dtype=torch.float64)
    momentum = chain.q if method == "Nesterov" else 0.0
    number, ratio, away = 0, float("inf"), 1.0
    while number < most and away > error:
        number += 1
        if method == "local steps":
            for _ in range(50):
                weights = weights - chain.gradient(weights) / (chain.condition * comm.size)
            comm.allreduce_(weights, scale=1 / comm.size).wait()
        else:
            ahead = weights + momentum * (weights - before)
            gradient = comm.allreduce(chain.gradient(ahead), scale=1 / comm.size)
            weights, before = ahead - gradient / chain.condition, weights
        away = ((weights - chain.least).norm() / chain.least.norm()).item()
        ratio = min(ratio, away / chain.q**number)
    return number, ratio, weights


def main() -> None:
    """Test the nonzero weights per round, then the rounds by condition number."""
    hvd.init()
    easy, hard = Chain(100.0), Chain(400.0)
    methods = "gradient descent", "Nesterov", "local steps"
    for method in methods[: 3 if hvd.size() > 1 else 2]:  # one rank has no neighbour to wait for
        _, ratio, weights = descend(easy, method, most=30, error=0.0)
        reached = weights.count_nonzero().item()
        claim(
            f"{method}: after 30 rounds {reached} weights are not zero, and the error is never "
            f"below {ratio:.2f} times the bound",
            holds=reached <= 30 and ratio > 0.999,
        )
    for method, low, high in (("gradient descent", 3.4, 4.4), ("Nesterov", 1.7, 2.3)):
        few, many = (descend(chain, method, 9000, 1e-3)[0] for chain in (easy, hard))
        claim(
            f"{method}: {few} rounds at a condition number of 100, {many} at 400",
            holds=low < many / few < high,
        )


if __name__ == "__main__":
    main()
