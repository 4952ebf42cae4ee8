"""The gradient noise scale of a training under way, from gradients that it calculates anyway."""

from collections.abc import Iterable

import torch
from torch import Tensor

from hpctrain.core.checks import Decay, checked
from hpctrain.core.errors import ConfigError
from hpctrain.cost.learning import noise_scale

Measured = tuple[float, float]
"""Samples, and the squared norm of their mean gradient."""


class NoiseScale:
    """Estimates the batch at which the noise of the gradient weighs as much as the gradient.

    The squared norm of a mean gradient of n samples is ``G2 + S / n`` on average, with that of the
    true gradient and the variance of one sample's. Two sizes of n in every step tell both: parts
    of a batch, as ranks or pieces of it have them, and the whole. Parts may be of different sizes,
    and so may batches: a part of n samples counts n times, a step by its samples. All sums fade by
    ``decay`` in each step, numerator and denominator apart from each other, as their ratio of one
    step says nothing.

    ``hpctrain.watch_noise(optimizer, noise)`` feeds it where ranks average, elsewhere ``add``.
    Twice as many samples are needed at a batch of ``value()`` as with tiny ones, which makes it
    the critical batch (``hpctrain plan --noise-scale``). A rank's own sums tell it from this
    rank's gradients; the mean of all ranks' sums from those of all, with less noise::

        noise.value(hvd.allreduce(noise.sums))

    Source: McCandlish et al. 2018, arXiv:1812.06162, appendix A.1.
    """

    def __init__(self, decay: float = 0.99) -> None:
        """Begin with nothing; ``ConfigError`` unless ``decay`` is from 0 on and below 1."""
        self._decay = checked("decay", decay, Decay)
        self.sums = torch.zeros(6, dtype=torch.float64)
        """Of parts, then of batches: their number, samples, samples times squared norm. All that
        it remembers: keep a copy to go on from."""

    def add(self, parts: Iterable[Measured], batch: Measured) -> None:
        """Add a step: some or all parts of a batch, and the batch. Not collective.

        A part without samples tells nothing, and a step with a gradient that is not finite
        neither: that is left out.
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
        """Return the noise scale in samples; of other ``sums`` than its own, if there are.

        None while it cannot be told: before the first step, where parts are whole batches, or
        where what was seen is all noise or none, as of too few steps.
        """
        number, samples, weighted = (self.sums if sums is None else sums).view(2, 3).T.tolist()
        if 0.0 in samples:
            return None
        # Norms weighted by n have the mean of 1 / n, weighted so too: that of n is one over it.
        sizes = [n / count for n, count in zip(samples, number, strict=True)]
        means = [total / n for total, n in zip(weighted, samples, strict=True)]
        try:
            return noise_scale((sizes[0], means[0]), (sizes[1], means[1]))
        except ConfigError:
            return None
