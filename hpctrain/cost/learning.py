"""Laws of papers about learning: what batches, local steps and rounds do to it.

Of batches: McCandlish et al. 2018, "An empirical model of large-batch training". Of local steps:
Stich 2018, "Local SGD converges fast and communicates little". Of rounds: Arjevani and Shamir
2015, "Communication complexity of distributed convex learning and optimization".
"""

import math

from hpctrain.core.errors import ConfigError


def noise_scale(small: tuple[float, float], large: tuple[float, float]) -> float:
    """Estimate the gradient noise scale, in samples, from gradients of two batch sizes.

    Each argument is a batch size and the mean of the squared norm of gradients of such batches:
    their expectation is ``G2 + S / batch``, with the squared norm G2 of the true gradient and the
    variance S of one sample's. Returns S / G2, the batch at which noise and gradient weigh the
    same: appendix A.1.

    Raises ``ConfigError``: the batches are not two sizes, or the norms do not fall from one to the
    other as they must, as of too few batches.
    """
    (batch, norm), (more, less) = sorted([small, large])
    if not 0 < batch < more:
        raise ConfigError(f"a noise scale takes two batch sizes, got {batch:g} and {more:g}")
    variance = (norm - less) / (1 / batch - 1 / more)
    squared = (more * less - batch * norm) / (more - batch)
    if variance <= 0 or squared <= 0:
        raise ConfigError(
            f"squared norms of gradients fall with the batch, but no faster than 1 over it, got "
            f"{norm:g} for {batch:g} samples and {less:g} for {more:g}; average over more batches"
        )
    return variance / squared


def samples_needed(samples: float, noise_scale: float, batch: float) -> float:
    """Return how many samples a batch size takes to the loss that tiny ones reach by ``samples``.

    Twice as many at a batch of ``noise_scale``; with it infinite, none more. Equation 2.11.
    """
    return samples * (1 + batch / noise_scale)


def most_local_steps(num_steps: float, ranks: int, rank_batch: float) -> float:
    """Return up to how many steps between two averagings local SGD converges as fast as SGD.

    In order of magnitude, for smooth and strongly convex losses and samples drawn alike on all
    ranks; nobody has proved it of deep networks.
    """
    return math.sqrt(num_steps / (ranks * rank_batch))


def fewest_rounds(condition: float, accuracy: float) -> float:
    """Return in how many rounds, at least, ranks of unlike data minimise, however they compute.

    Up to a constant factor, for smooth and strongly convex losses of this condition number, until
    the loss is ``accuracy`` of what it was above the least.
    """
    return math.sqrt(condition) * math.log(1 / accuracy)
