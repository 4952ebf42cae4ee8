"""The order of the samples of an epoch: a bijection of [0, n), computed on demand.

An order depends on (n, seed, epoch), not on ranks or files, and needs constant memory: position
``p`` of the epoch is sample ``order.samples_at(p)``.

A stored permutation of 1e9 samples would need 8 GB on every rank.
"""

from typing import Protocol

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.data.order.feistel import Feistel, Words
from hpctrain.data.samples import Indices

SMALL = 4096
"""Up to this size a permutation is drawn, so that all orders are equally likely."""


class Order(Protocol):
    """Protocol of orders: bijections between positions of an epoch and samples."""

    def samples_at(self, positions: Indices) -> Indices:
        """Return the samples at ``positions`` of the epoch; both are in [0, n)."""


def global_order(n: int, seed: int, epoch: int) -> "FisherYates | Shuffled":
    """Return a shuffled order in which each sample can have any position.

    Raises ``DataError``: an argument is out of range.
    """
    check_order(n, seed, epoch)
    return FisherYates(n, seed, epoch) if n <= SMALL else Shuffled(n, seed, epoch)


def check_order(n: int, seed: int, epoch: int) -> None:
    """Raise ``DataError`` if an argument of an order is out of range."""
    if not 1 <= n < 2**62 or not 0 <= seed < 2**64 or not 0 <= epoch < 2**64:
        raise DataError(
            f"an order must have 1 <= n < 2^62 and a seed and an epoch in [0, 2^64), got "
            f"n={n}, seed={seed}, epoch={epoch}"
        )


class Sequential:
    """Order of the samples on disk, starting at sample ``start``."""

    def __init__(self, start: int = 0) -> None:
        self._start = start

    def samples_at(self, positions: Indices) -> Indices:
        """Return ``start`` plus the positions."""
        return positions + self._start if self._start else positions


class FisherYates:
    """Random order of few samples, stored as a permutation.

    The permutation uses the words of the Philox bit generator, which are the same in all versions
    of numpy, unlike ``Generator.permutation``.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        philox = np.random.Philox(key=np.array([seed, epoch], np.uint64))
        # Scale the high half of each word to the number of choices. This needs no division, and
        # the bias is below 2^-16.
        choices: Words = philox.random_raw(n) >> np.uint64(32)
        choices *= np.arange(1, n + 1, dtype=np.uint64)
        choices >>= np.uint64(32)
        samples = list(range(n))
        for last, other in enumerate(choices.tolist()):
            samples[last], samples[other] = samples[other], samples[last]
        self._samples = np.array(samples, np.int64)

    def samples_at(self, positions: Indices) -> Indices:
        """Return the samples at ``positions`` of the epoch."""
        return self._samples[positions]

    def positions_of(self, samples: Indices) -> Indices:
        """Return the positions of ``samples`` in the epoch."""
        return np.argsort(self._samples)[samples]


class Shuffled:
    """Random order of many samples, computed on demand in constant memory."""

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        self._network = Feistel(n, seed, epoch)

    def samples_at(self, positions: Indices) -> Indices:
        """Return the samples at ``positions`` of the epoch."""
        return self._mapped(positions, is_back=False)

    def positions_of(self, samples: Indices) -> Indices:
        """Return the positions of ``samples`` in the epoch."""
        return self._mapped(samples, is_back=True)

    def _mapped(self, values: Indices, *, is_back: bool) -> Indices:
        mapped = self._network.forward(as_words(values.ravel()), is_back=is_back)
        return as_indices(mapped).reshape(values.shape)


def as_words(indices: Indices) -> Words:
    """Return the bits of indices as uint64."""
    return np.ascontiguousarray(indices).view(np.uint64)


def as_indices(words: Words) -> Indices:
    """Return the bits of words as int64."""
    return words.view(np.int64)
