"""Define the training job of these tests: a small network on scikit-learn's digits."""

from functools import cache

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

EVERY_SIZE = pytest.mark.ranks(1, 2, 3, 4)
MANY = pytest.mark.ranks(2, 3, 4)
OVERLAPS = pytest.mark.usefixtures("overlap")
LAST = pytest.mark.usefixtures("last")
ONE_NODE = pytest.mark.parametrize("per_node", [None], indirect=True, ids=["one node"])
TWO_NODES = pytest.mark.parametrize("per_node", [2], indirect=True, ids=["nodes of two"])
"""Two nodes of three or four ranks, so that some of them share memory and others do not."""

GLOBAL_BATCH = 60  # divisible by 1, 2, 3 and 4


@cache
def digits(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return images, scaled to 0..1, and their digits."""
    images, labels = load_digits(return_X_y=True)
    return torch.tensor(images / 16.0, dtype=dtype), torch.tensor(labels)


def make_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    """Make a network, identical in every call."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    return model.to(dtype)


def global_batch(step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Return the global batch of a step, the same on every rank and for every world size."""
    images, labels = digits(dtype)
    first = step * GLOBAL_BATCH % (len(images) - GLOBAL_BATCH)
    return images[first : first + GLOBAL_BATCH], labels[first : first + GLOBAL_BATCH]


def part_of(batch: tuple[Tensor, Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    """Return one rank's equal part of a global batch."""
    share = GLOBAL_BATCH // size
    own = slice(rank * share, (rank + 1) * share)
    return batch[0][own], batch[1][own]


def sgd(model: nn.Module, **options) -> torch.optim.SGD:
    """Make the optimizer that the tests use."""
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, **options)


@cache
def train_alone(num_steps: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Train with the plain loop in one process on global batches; many tests compare with this."""
    model = make_model(dtype)
    optimizer = sgd(model)
    for step in range(num_steps):
        images, labels = global_batch(step, dtype)
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def train_together(hvd, num_steps: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """Train on all ranks, each on its part of the global batches."""
    model = make_model(dtype)
    optimizer = hvd.DistributedOptimizer(sgd(model), model.named_parameters())
    hvd.broadcast_parameters(model.state_dict())
    for step in range(num_steps):
        images, labels = part_of(global_batch(step, dtype), hvd.rank(), hvd.size())
        optimizer.zero_grad()
        cross_entropy(model(images), labels).backward()
        optimizer.step()
    return model


def largest_difference(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference of two models' weights over the largest weight."""
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    largest = max(float(a.detach().abs().max()) for a, _ in pairs)
    return max(float((a - b).detach().abs().max()) for a, b in pairs) / largest


def gradients(model: nn.Module) -> list[Tensor | None]:
    """Return copies of all gradients."""
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


def expected_gradients(step: int = 0) -> list[Tensor | None]:
    """Return the gradients of one process on a global batch."""
    model = make_model()
    images, labels = global_batch(step)
    cross_entropy(model(images), labels).backward()
    return gradients(model)


def distributed(hvd, model: nn.Module, **options):
    """Make a distributed optimizer of the model."""
    return hvd.DistributedOptimizer(sgd(model), model.named_parameters(), **options)


def wrapped(hvd, **options):
    """Make the network and its distributed optimizer."""
    model = make_model()
    return model, distributed(hvd, model, **options)


def backward(hvd, model: nn.Module, step: int = 0) -> None:
    """Run backward on this rank's part of a global batch."""
    images, labels = part_of(global_batch(step), hvd.rank(), hvd.size())
    cross_entropy(model(images), labels).backward()


def assert_averages(hvd, model: nn.Module, optimizer) -> None:
    """Assert that gradients are averages when backward returns, in three steps."""
    for step in range(3):
        optimizer.zero_grad()
        backward(hvd, model, step)
        assert_close(gradients(model), expected_gradients(step))


def assert_close(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """Assert that gradients are equal up to rounding; None equals only None."""
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-14)
