"""The order of the samples of an epoch: a bijection of [0, n), computed where it is needed.

An order is a function of (n, seed, epoch) only, never of the ranks or the files, and takes
constant memory: position ``p`` of the epoch is sample ``order.samples_at(p)``.

Differs from drawing a permutation: at a thousand million samples that is 8 GB on every rank.
"""

from functools import cached_property
from math import isqrt
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hpctrain.errors import DataError

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

SMALL = 65536
"""Up to here a permutation is drawn: six Feistel rounds do not reach all of a few samples."""

_ROUNDS = 6
_WORD = 2**64


class Order(Protocol):
    """A bijection between positions of an epoch and samples."""

    def samples_at(self, positions: Indices) -> Indices:
        """Return the samples at some positions, both in [0, n)."""

    def positions_of(self, samples: Indices) -> Indices:
        """Return the positions of some samples: the inverse of ``samples_at``."""


def global_order(n: int, seed: int, epoch: int) -> Order:
    """Shuffle all samples: any sample can come at any position.

    Args:
        n: number of samples, at least 1 and below 2^62.
        seed: of the whole training, in [0, 2^64).
        epoch: in [0, 2^64).

    Raises:
        DataError: an argument is out of range.
    """
    if not 1 <= n < 2**62 or not 0 <= seed < _WORD or not 0 <= epoch < _WORD:
        raise DataError(
            f"an order needs 1 <= n < 2^62 and a seed and an epoch in [0, 2^64), "
            f"got n={n}, seed={seed}, epoch={epoch}"
        )
    return FisherYates(n, seed, epoch) if n <= SMALL else Feistel(n, seed, epoch)


class Sequential:
    """Samples as they lie in the files."""

    def samples_at(self, positions: Indices) -> Indices:
        """Return the positions."""
        return positions

    def positions_of(self, samples: Indices) -> Indices:
        """Return the samples."""
        return samples


class FisherYates:
    """A permutation drawn at once, for few samples.

    Random words come straight from the Philox counter, whose stream numpy promises to keep;
    it makes no such promise for ``Generator.permutation``.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        """Draw the permutation; arguments as in ``global_order``."""
        philox = np.random.Philox(key=np.array([seed, epoch], np.uint64))
        # The high half of a word times the number of choices: no division, bias under 2^-16.
        choices: Words = philox.random_raw(n) >> np.uint64(32)
        choices *= np.arange(1, n + 1, dtype=np.uint64)
        choices >>= np.uint64(32)
        samples = list(range(n))
        for last, other in enumerate(choices.tolist()):
            samples[last], samples[other] = samples[other], samples[last]
        self._samples = np.array(samples, np.int64)

    def samples_at(self, positions: Indices) -> Indices:
        """Look the samples up."""
        return self._samples[positions]

    def positions_of(self, samples: Indices) -> Indices:
        """Look the positions up."""
        return self._positions[samples]

    @cached_property
    def _positions(self) -> Indices:
        return np.argsort(self._samples)


class Feistel:
    """A keyed bijection of [0, n) by a Feistel network on a grid of at least n cells.

    A cell is (left, right) with ``rows * columns >= n``; a round adds a hash of one half to the
    other, modulo its extent, hence is invertible whatever the hash. A cell outside [0, n) is
    sent through again until it falls inside; fewer than one in sqrt(n) needs that.

    Source: Luby and Rackoff 1988 for the network, Black and Rogaway 2002 for the walk.
    """

    def __init__(self, n: int, seed: int, epoch: int) -> None:
        """Derive the keys of the rounds; arguments as in ``global_order``."""
        self._n = np.uint64(n)
        rows = isqrt(n - 1) + 1
        self._extents = (np.uint64(rows), np.uint64(-(-n // rows)))
        words = np.array([seed, epoch], np.uint64)
        mixed = _splitmix64(_splitmix64(words[:1]) + words[1:])
        self._keys = [_splitmix64(mixed + np.uint64(index)) for index in range(_ROUNDS)]

    def samples_at(self, positions: Indices) -> Indices:
        """Compute the samples."""
        return self._walk(positions, inverse=False)

    def positions_of(self, samples: Indices) -> Indices:
        """Compute the positions."""
        return self._walk(samples, inverse=True)

    def _walk(self, start: Indices, *, inverse: bool) -> Indices:
        step = self._decrypt if inverse else self._encrypt
        cells = step(start.astype(np.uint64).ravel())
        outside = np.flatnonzero(cells >= self._n)
        while outside.size:
            cells[outside] = step(cells[outside])
            outside = outside[cells[outside] >= self._n]
        return cells.astype(np.int64).reshape(start.shape)

    def _encrypt(self, cells: Words) -> Words:
        halves: list[Words] = list(np.divmod(cells, self._extents[1]))
        for index, key in enumerate(self._keys):
            side = index % 2
            halves[side] = (
                halves[side] + self._hash(halves[1 - side], key, side)
            ) % self._extents[side]
        return halves[0] * self._extents[1] + halves[1]

    def _decrypt(self, cells: Words) -> Words:
        halves: list[Words] = list(np.divmod(cells, self._extents[1]))
        for index, key in reversed(list(enumerate(self._keys))):
            side = index % 2
            extent = self._extents[side]
            halves[side] = (
                halves[side] + extent - self._hash(halves[1 - side], key, side)
            ) % extent
        return halves[0] * self._extents[1] + halves[1]

    def _hash(self, half: Words, key: Words, side: int) -> Words:
        return _splitmix64(half ^ key) % self._extents[side]


def _splitmix64(words: Words) -> Words:
    """Mix 64-bit words, modulo 2^64. Source: Steele, Lea and Flood 2014."""
    z = words + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))
