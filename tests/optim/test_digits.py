"""Large batches on digits: effects of warm-up, linear scaling and layer-wise rates, as in papers.

The tests compare the training loss over several seeds: 360 test images are too few for an error.
"""

from statistics import fmean

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from hpctrain.optim import LAMB, LARS, exclusions
from hpctrain.train.load_config import load
from hpctrain.train.model import make_schedule

pytestmark = [pytest.mark.conformance, pytest.mark.limit(120)]

BATCH_128 = ["train.global_batch=128", "train.epochs=20"]
BATCH_256 = ["train.global_batch=256", "train.epochs=40"]
ROUGH = {"depth": 4, "gain": 2.0}


@pytest.fixture(scope="module")
def digits():
    found = load_digits()
    order = np.random.default_rng(0).permutation(len(found.target))
    x, y = torch.from_numpy(found.data[order] / 16).float(), torch.from_numpy(found.target[order])
    return (x[:1437], y[:1437]), (x[1437:], y[1437:])


def network(depth, gain):
    sizes = [64] * (depth + 1)
    layers = [nn.Linear(a, b) for a, b in zip(sizes, [*sizes[1:], 10], strict=True)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        layer.weight.data *= gain
    return nn.Sequential(*[part for layer in layers for part in (layer, nn.ReLU())][:-1])


def trained(digits, seed, optimizer_of, *keys, depth, gain=1.0, rescale=1.0):
    """Train with [train] and [schedule]; return the training loss and the test error in %."""
    (x, y), (test_x, test_y) = digits
    config = load(None, [*keys]).config
    torch.manual_seed(seed)
    model = network(depth, gain)
    # The number of layers is even, so the network computes the same function.
    for number, layer in enumerate(model[::2]):
        layer.weight.data *= rescale ** (-1) ** number
    optimizer, batch = optimizer_of(model), config.train.global_batch
    at, step = make_schedule(config, -(-len(x) // batch)), 0
    peaks = [group["lr"] for group in optimizer.param_groups]
    for _ in range(config.train.epochs):
        for part in torch.randperm(len(x)).split(batch):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * at(step)
            optimizer.zero_grad()
            cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
            step += 1
    with torch.no_grad():
        errors = 100 * (model(test_x).argmax(dim=1) != test_y).float().mean()
        return float(cross_entropy(model(x), y)), float(errors)


def sgd(lr):
    return lambda model: torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)


@pytest.mark.parametrize("lr", [0.02, 0.04])
def test_warm_up_reduces_the_loss_of_a_badly_scaled_network(digits, lr):
    """The initial weights are twice as large as usual."""
    found = [
        [
            trained(digits, seed, sgd(lr), *BATCH_128, f"schedule.warmup_epochs={n}", **ROUGH)[0]
            for seed in range(6)
        ]
        for n in (0, 5)
    ]
    assert fmean(found[1]) <= 0.8 * fmean(found[0])
    assert sum(warm <= cold for cold, warm in zip(*found, strict=True)) >= 5


def test_warm_up_does_not_reduce_the_loss_of_a_well_scaled_network(digits):
    """With usual initial weights, the small rates of the warm-up only cost progress."""
    cold, warm = (
        fmean(
            trained(digits, seed, sgd(0.02), *BATCH_128, f"schedule.warmup_epochs={n}", depth=4)[0]
            for seed in range(6)
        )
        for n in (0, 5)
    )
    assert warm >= 0.8 * cold


@pytest.mark.parametrize("lr", [0.00625, 0.0125, 0.05])
def test_linear_scaling_helps_below_a_limit_of_the_rate(digits, lr):
    """A batch of 256 with the rate of a batch of 16, and with 16 times that rate."""
    plain, scaled = (
        fmean(
            trained(digits, seed, sgd(lr), *BATCH_256, f"schedule.base_batch={n}", depth=3)[0]
            for seed in range(4)
        )
        for n in (0, 16)
    )
    if lr < 0.05:
        assert scaled <= 0.1 * plain
    else:
        assert not scaled <= 1.0


def test_lars_and_lamb_train_layers_of_different_scales(digits):
    """Layers are alternately 8 times larger and smaller: the same function, harder for SGD."""

    def best(optimizers):
        def error(optimizer_of):
            how = {"depth": 3, "rescale": 8.0}
            runs = [trained(digits, s, optimizer_of, *BATCH_128, **how) for s in range(3)]
            return fmean(errors for _, errors in runs)

        return min(map(error, optimizers))

    plain = best(map(sgd, [0.001, 0.003, 0.01, 0.03, 0.1, 0.3]))
    lars = [lambda m, lr=lr: LARS(exclusions(m), lr, trust_coefficient=0.02) for lr in (0.3, 1.0)]
    lamb = [lambda m, lr=lr: LAMB(exclusions(m), lr) for lr in (0.01, 0.03)]
    assert best(lars) <= plain - 1.0
    assert best(lamb) <= plain - 1.0
