"""``NoiseScale``, which estimates the gradient noise scale during training."""

from collections.abc import Iterable

import torch
from torch import Tensor

from hpctrain.core.checks import Decay, checked
from hpctrain.core.errors import ConfigError
from hpctrain.cost.learning import noise_scale

Measured = tuple[float, float]
"""Number of samples, and the squared norm of their mean gradient."""


class NoiseScale:
    """Estimates the batch size at which gradient noise is as large as the gradient.

    The expected squared norm of the mean gradient of n samples is ``G2 + S / n``, where G2 is the
    squared norm of the true gradient and S the variance of the gradient of one sample. Every step
    provides this norm for two values of n: the size of a part of the batch (the samples of a rank
    or a micro-batch), and the size of the whole batch; both sizes may vary. Parts and steps are
    weighted by their numbers of samples. S and G2 are estimated from sums over steps, because the
    S / G2 of a single step is dominated by noise; each step multiplies the earlier sums by
    ``decay``.

    ``hpctrain.watch_noise(optimizer, noise)`` adds the steps of a ``DistributedOptimizer``;
    programs without a ``DistributedOptimizer`` call ``add``. ``value()`` is the critical batch
    size: at this batch size, training needs twice as many samples as with small batches
    (``hpctrain plan --noise-scale``). The attribute ``sums`` of a rank contains only this rank's
    parts; the mean of ``sums`` over all ranks has less noise::

        noise.value(hvd.allreduce(noise.sums))

    Args:
        decay: factor of all sums per step, at least 0 and below 1.

    Raises:
        ConfigError: ``decay`` is not valid.

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """

    def __init__(self, decay: float = 0.99) -> None:
        self._decay = checked("decay", decay, Decay)
        self.sums = torch.zeros(6, dtype=torch.float64)
        """Sums over steps, as the state for a checkpoint; shape (6,).

        Elements 0 to 2 are for parts of batches, elements 3 to 5 for whole batches: the number of
        parts or batches, the number of samples, and samples times squared norm.
        """

    def add(self, parts: Iterable[Measured], batch: Measured) -> None:
        """Add one step. Not collective.

        A part without samples is ignored. A step is ignored if a gradient is not finite.

        Args:
            parts: number of samples and squared gradient norm of some or all parts of a batch.
            batch: number of samples and squared gradient norm of the batch.
        """
        step = torch.zeros(2, 3, dtype=torch.float64)
        for row, found in ((0, parts), (1, [batch])):
            for num_samples, square in found:
                if num_samples > 0:
                    new = (1.0, num_samples, num_samples * square)
                    step[row] += torch.tensor(new, dtype=torch.float64)
        if step.isfinite().all():
            self.sums = self._decay * self.sums + step.flatten()

    def value(self, sums: Tensor | None = None) -> float | None:
        """Return the noise scale in samples, or None if it cannot be estimated.

        The noise scale cannot be estimated before the first step, if parts are whole batches, or
        if the steps so far are too few to separate noise from gradient.

        Args:
            sums: sums to use instead of ``self.sums``, for example the mean over ranks.
        """
        number, samples, weighted = (self.sums if sums is None else sums).view(2, 3).T.tolist()
        if 0.0 in samples:
            return None
        # The mean of 1 / n with weights n is the number of parts divided by the number of samples.
        sizes = [n / count for n, count in zip(samples, number, strict=True)]
        means = [total / n for total, n in zip(weighted, samples, strict=True)]
        try:
            return noise_scale((sizes[0], means[0]), (sizes[1], means[1]))
        except ConfigError:
            return None
