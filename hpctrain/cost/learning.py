"""Published formulas for the effect of batch size, local steps and rounds on convergence.

Batches: McCandlish et al. 2018, "An empirical model of large-batch training". Local steps:
Stich 2018, "Local SGD converges fast and communicates little". Rounds: Arjevani and Shamir
2015, "Communication complexity of distributed convex learning and optimization".
"""

import math

from hpctrain.core.errors import ConfigError


def noise_scale(small: tuple[float, float], large: tuple[float, float]) -> float:
    """Estimate the gradient noise scale, in samples, from gradients of two batch sizes.

    The expected squared norm of a gradient is ``G2 + S / batch``, where G2 is the squared norm of
    the true gradient and S the variance of the gradient of one sample (appendix A.1).

    Args:
        small: batch size and mean squared norm of gradients of this size.
        large: batch size and mean squared norm of gradients of a larger batch.

    Returns:
        S / G2, the batch size at which noise and gradient have equal norm.

    Raises:
        ConfigError: the sizes are equal, or the norms do not decrease as expected, for example
            because too few batches were averaged.
    """
    (batch, norm), (more, less) = sorted([small, large])
    if not 0 < batch < more:
        raise ConfigError(f"two batch sizes must be positive and differ, got {batch:g}, {more:g}")
    variance = (norm - less) / (1 / batch - 1 / more)
    squared = (more * less - batch * norm) / (more - batch)
    if variance <= 0 or squared <= 0:
        raise ConfigError(
            f"squared norms of gradients must decrease with the batch, and more slowly than 1 / "
            f"batch, got {norm:g} for {batch:g} samples and {less:g} for {more:g}; average over "
            f"more batches"
        )
    return variance / squared


def samples_needed(samples: float, noise_scale: float, batch: float) -> float:
    """Return the number of samples that training needs to reach a loss with this batch size.

    The result is ``samples`` for a very small ``batch``, and twice as large if ``batch`` equals
    ``noise_scale`` (equation 2.11).
    """
    return samples * (1 + batch / noise_scale)


def most_local_steps(num_steps: float, ranks: int, rank_batch: float) -> float:
    """Return the largest number of local steps with which local SGD converges as fast as SGD.

    The result is an order of magnitude, proved for smooth, strongly convex losses and identically
    distributed samples on all ranks, but not for deep networks.
    """
    return math.sqrt(num_steps / (ranks * rank_batch))


def fewest_rounds(condition: float, accuracy: float) -> float:
    """Return a lower bound of the rounds in which ranks with different data minimize a loss.

    The bound holds up to a constant factor for smooth, strongly convex losses with the condition
    number ``condition``. The rounds end when the excess loss has decreased to ``accuracy`` times
    its initial value.
    """
    return math.sqrt(condition) * math.log(1 / accuracy)
