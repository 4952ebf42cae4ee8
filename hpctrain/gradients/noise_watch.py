"""Measure the gradient noise scale from gradient norms before and after the average."""

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
    """Add the gradient norms of every step of a distributed optimizer to a noise scale.

    Not collective; every rank calls this function, with its own ``NoiseScale``. A step then takes
    two more passes over the gradients: for the norm of this rank's gradients before the sum, and
    for the norm of the average. The sample count of a rank is set by ``set_num_samples``, for all
    backward passes of a step together; without this call, the step of a rank counts as one sample.
    A rank without gradients in a step is not counted. Sparse gradients are ignored, and a lossy
    codec adds its error to the measured noise. In a world of one rank nothing is measured; the
    program can call ``noise.add`` with the norms of parts of a batch.

    Args:
        optimizer: ``DistributedOptimizer`` with ``op=Average`` and without ``shard``.
        noise: noise scale that receives the norms.

    Raises:
        ConfigError: the optimizer does not average gradients in ``backward()``.
    """
    exchange = exchange_of(optimizer)
    if isinstance(exchange, NoExchange):  # a world of one rank
        return
    if not isinstance(exchange, AveragedGradients) or not exchange.count.average:
        raise ConfigError(
            f"watch_noise must get a DistributedOptimizer with op=Average and without "
            f'shard="node", got {type(optimizer).__name__}; wrap the optimizer, or call '
            f"noise.add in each step"
        )
    exchange.reduction.around = _Watch(exchange.reduction, noise).around


class _Watch:
    """Computes squared norms of the buckets of a step before and after their sums."""

    def __init__(self, reduction: Reduction, noise: NoiseScale) -> None:
        self._reduction: Any = proxy(reduction)  # no cycle: the reduction refers to this object
        self._noise = noise
        self._own = self._average = 0.0  # squared norms of the buckets of this step so far
        self._has_own = False

    @contextmanager
    def around(self, what: GradientBucket | SparseSlot) -> Iterator[None]:
        """Measure norms of one bucket before and after its sum; the sum runs inside the context.

        After the last bucket of a step, the norms are added to the noise scale.
        """
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
    """Wait until the device of ``gradient`` is idle; no-op on the CPU."""
    if not gradient.is_cpu:
        torch.accelerator.synchronize(gradient.device)


def _square(gradients: list[Tensor]) -> float:
    """Return the squared norm of the concatenated gradients of a bucket."""
    return float(norms([g.cpu() for g in gradients]).square().sum())
