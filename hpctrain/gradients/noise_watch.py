"""The gradient noise scale of ranks that average: norms are taken around each bucket's sum."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from weakref import proxy

import torch
from torch import Tensor

from hpctrain.comm.norms import norms
from hpctrain.core.errors import ConfigError
from hpctrain.gradients.averaged_gradients import AveragedGradients
from hpctrain.gradients.gradient_bucket import GradientBucket
from hpctrain.gradients.optimizer_exchange import NoExchange, exchange_of
from hpctrain.gradients.reduction import Reduction
from hpctrain.gradients.sparse_gradients import SparseSlot
from hpctrain.optim.noise_scale import NoiseScale


def watch_noise(optimizer: Any, noise: NoiseScale) -> None:
    """Let every step of a distributed optimizer tell a noise scale of its gradients.

    Not collective; every rank calls it, with a noise scale of its own. A step then takes two
    passes more over the gradients: the norm of this rank's before the sum, of the average behind
    it. Ranks count by ``set_num_samples``; where that is not called, each step of a rank counts as
    one sample. A rank without gradients in a step is no part of it. With several passes before a
    step the samples of all of them are to be counted. Sparse gradients are left out, and a codec
    that loses something changes the average, so it adds to the noise that is found. In a world of
    one nothing is told: there call ``noise.add`` with the norms of pieces of a batch.

    Raises:
        ConfigError: this optimizer does not average gradients in ``backward()``.
    """
    exchange = exchange_of(optimizer)
    if isinstance(exchange, NoExchange):  # a world of one
        return
    if not isinstance(exchange, AveragedGradients) or not exchange.count.average:
        raise ConfigError(
            f"a noise scale compares gradients of ranks with their average, which backward() of a "
            f'DistributedOptimizer with op=Average and without shard="node" has, got '
            f"{type(optimizer).__name__}; wrap the optimizer so, or call noise.add by hand"
        )
    exchange.reduction.around = _Watch(exchange.reduction, noise).around


class _Watch:
    """Takes squared norms of a step's buckets before and behind their sums."""

    def __init__(self, reduction: Reduction, noise: NoiseScale) -> None:
        self._reduction: Any = proxy(reduction)  # which has this
        self._noise = noise
        self._own = self._average = 0.0  # of the buckets of this step, so far
        self._has_own = False

    @contextmanager
    def around(self, what: GradientBucket | SparseSlot) -> Iterator[None]:
        """Let one bucket be summed; behind the last one, the step is told."""
        if isinstance(what, SparseSlot):
            yield
            return
        _wait_for(what.slots[0].view)
        buckets, count = self._reduction.layout.buckets, self._reduction.count
        if what is buckets[0]:
            self._own, self._average, self._has_own = 0.0, 0.0, False
        if count.factor and any(slot.is_present for slot in what.slots):
            self._has_own = True
            self._own += _square(what.parts) / count.factor**2
        yield
        _wait_for(what.slots[0].view)
        self._average += _square(what.parts)
        if what is buckets[-1]:
            own = [(count.weight * count.nominal, self._own)] if self._has_own else []
            self._noise.add(own, (count.total_weight * count.nominal, self._average))


def _wait_for(gradient: Tensor) -> None:
    """Let the host wait for the accelerator of a gradient, if it is on one: it reads them."""
    if not gradient.is_cpu:
        torch.accelerator.synchronize(gradient.device)


def _square(gradients: list[Tensor]) -> float:
    """Return the squared norm of all gradients of a bucket together."""
    return float(norms([g.cpu() for g in gradients]).square().sum())
