"""Large batches: the learning rate scales with the batch, up to a limit, and needs a warm-up.

    hpctrain launch -n 2 -- python examples/tour/08_large_batch.py

With 16 times the batch an epoch has 1/16 of the steps. With the same learning rate the loss is
higher; 16 times the rate compensates for this. The limit is the largest stable rate: with another
factor of 8 training fails. The first steps are critical: with large initial weights, a rate that
increases over the first five epochs reaches a lower loss than a constant one. Ranks divide every
batch.

Source: Goyal et al. 2017, arXiv:1706.02677. On handwritten digits; needs scikit-learn.
"""

import math
from itertools import pairwise

import torch
from claim import claim
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import hpctrain as hvd

SMALL, LARGE, SEEDS = 16, 256, 4
DIGITS = load_digits()
X, Y = torch.tensor(DIGITS.data[:1437]).float() / 16, torch.tensor(DIGITS.target[:1437])


def network(depth: int, gain: float) -> nn.Sequential:
    """Return a network of ReLUs; a ``gain`` of 1 preserves the magnitude of activations."""
    widths = [64, *[64] * depth, 10]
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    for layer in layers:
        nn.init.normal_(layer.weight, std=gain * (2 / layer.in_features) ** 0.5)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(*[each for layer in layers for each in (layer, nn.ReLU())][:-1])


def train(model: nn.Module, rate: float, batch: int, epochs: int, warm_up: int = 0) -> float:
    """Train with a cosine schedule, and return the loss over all examples.

    ``warm_up`` epochs let it grow first.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    steps_per_epoch = len(X) // batch
    for step in range(epochs * steps_per_epoch):
        if step % steps_per_epoch == 0:
            order = torch.randperm(len(X))
        part = order[step % steps_per_epoch * batch :][:batch][hvd.rank() :: hvd.size()]
        optimizer.set_num_samples(len(part), nominal=batch / hvd.size())
        factor = 0.5 * (1 + math.cos(math.pi * step / (epochs * steps_per_epoch)))
        factor *= min(1.0, (step + 1) / (warm_up * steps_per_epoch)) if warm_up else 1.0
        optimizer.param_groups[0]["lr"] = rate * factor
        optimizer.zero_grad()
        cross_entropy(model(X[part]), Y[part]).backward()
        optimizer.step()
    return cross_entropy(model(X), Y).item()


def main() -> None:
    """Compare losses with and without scaled rates, then with and without a warm-up."""
    hvd.init()
    losses = []
    for rate in (0.0125, LARGE // SMALL * 0.0125, LARGE // SMALL * 0.1):
        torch.manual_seed(0)
        losses.append(train(network(3, 1.0), rate, LARGE, epochs=40))
    old, scaled, too_large = losses
    claim(
        f"a batch of {LARGE}, the rate of {SMALL}: loss {old:.4f}; {LARGE // SMALL} times that: "
        f"{scaled:.4f}",
        holds=scaled <= 0.1 * old,
    )
    claim(f"eight times that: {too_large:.2f}; who guesses has ln 10", holds=not too_large < 2)

    at_once = warm = 0.0
    for seed in range(SEEDS):
        for warm_up in (0, 5):
            torch.manual_seed(seed)
            loss = train(network(4, 2.0), 0.02, LARGE // 2, epochs=20, warm_up=warm_up) / SEEDS
            at_once, warm = (at_once, warm + loss) if warm_up else (at_once + loss, warm)
    claim(
        f"weights twice too large, {SEEDS} seeds: {at_once:.3f}; with a warm-up {warm:.3f}",
        holds=warm <= 0.8 * at_once,
    )


if __name__ == "__main__":
    main()
