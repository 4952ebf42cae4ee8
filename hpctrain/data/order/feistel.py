"""A keyed bijection of [0, size) in constant memory: the base of all shuffled orders."""

from math import isqrt

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]

SMALL = 512
"""Below this size a network has 12 rounds, as 6 rounds cannot produce all orders of few values."""

_ROUNDS, _ROUNDS_SMALL = 6, 12
_PIECE = 16384  # number of values whose intermediate results fit into the cache of a core


class Feistel:
    """A keyed permutation of [0, size), computed by a Feistel network in constant memory.

    A value is a cell (left, right) of a grid with ``rows * columns >= size``. A round adds a hash
    of one half to the other half, modulo the extent of the other half, so a round is invertible
    for any hash. The network is applied again until the result is below the limit (cycle walking);
    with the limit ``size``, fewer than one value in sqrt(size) needs this.

    The keys of the rounds are derived from ``words`` in [0, 2^64); ``size`` must be below 2^62.

    Source: Luby and Rackoff 1988 for the network, Black and Rogaway 2002 for the walk.
    """

    def __init__(self, size: int, *words: int) -> None:
        self.size = size
        rows = isqrt(size - 1) + 1
        self._extents = (np.uint64(rows), np.uint64(-(-size // rows)))
        rounds = _ROUNDS_SMALL if size < SMALL else _ROUNDS
        start = key_of(*words)
        self._keys = [key_of((start + index) % 2**64) for index in range(rounds)]

    def forward(
        self,
        values: Words,
        limits: Words | None = None,
        tweaks: Words | None = None,
        *,
        is_back: bool = False,
    ) -> Words:
        """Permute values in [0, limit); each tweak gives another permutation.

        All arrays are ``(count,)``. A limit is at most ``size``, the default; for a limit far
        below ``size``, the network is applied many times. ``is_back`` applies the inverse
        permutation, for the same limits and tweaks.
        """
        result = np.empty_like(values)
        for start in range(0, len(values), _PIECE):
            some = slice(start, start + _PIECE)
            limit = np.uint64(self.size) if limits is None else limits[some]
            tweak = None if tweaks is None else tweaks[some]
            cells = self._step(values[some], tweak, is_back=is_back)
            outside = np.flatnonzero(cells >= limit)
            while outside.size:
                tweak_there = None if tweak is None else tweak[outside]
                again = self._step(cells[outside], tweak_there, is_back=is_back)
                cells[outside] = again
                limit_there = limit if isinstance(limit, np.uint64) else limit[outside]
                outside = outside[again >= limit_there]
            result[some] = cells
        return result

    def _step(self, cells: Words, tweaks: Words | None, *, is_back: bool) -> Words:
        left = cells // self._extents[1]
        halves = (left, cells - left * self._extents[1])
        rounds = list(enumerate(self._keys))
        for index, key in reversed(rounds) if is_back else rounds:
            side = index % 2
            extent, half = self._extents[side], halves[side]
            hashed = self._hash(halves[1 - side], key, tweaks, side)
            # A minimum replaces the modulo: the sum is below twice the extent, and a negative
            # difference wraps around to a huge unsigned number.
            if is_back:
                half -= hashed
                np.minimum(half, half + extent, out=half)
            else:
                half += hashed
                np.minimum(half, half - extent, out=half)
        return halves[0] * self._extents[1] + halves[1]

    def _hash(self, half: Words, key: int, tweaks: Words | None, side: int) -> Words:
        words = half ^ np.uint64(key)
        if tweaks is not None:
            words ^= tweaks
        splitmix64_(words)
        extent = self._extents[side]
        # numpy computes quotients by a constant much faster than remainders.
        words -= words // extent * extent
        return words


def splitmix64_(words: Words) -> None:
    """Mix 64-bit words in place, modulo 2^64. Source: Steele, Lea and Flood 2014."""
    words += np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(30)
    words *= np.uint64(0xBF58476D1CE4E5B9)
    words ^= words >> np.uint64(27)
    words *= np.uint64(0x94D049BB133111EB)
    words ^= words >> np.uint64(31)


def key_of(*words: int) -> int:
    """Mix one or more words in [0, 2^64) into one word; the order of the words matters."""
    key = np.zeros(1, np.uint64)
    for word in words:
        key += np.uint64(word)
        splitmix64_(key)
    return int(key[0])
