"""Parts of a split: a function of seed and sample, without a list of all."""

from collections.abc import Mapping, Sequence
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import PLAIN_NAME
from hpctrain.data.order.order import global_order

_TAG = 1 << 63
"""Keeps these permutations apart from those of epochs, which count from 0."""

Shares = Mapping[str, Fraction]
"""Share of each part; they sum to 1."""


def parse_shares(texts: Sequence[str]) -> dict[str, Fraction]:
    """Read shares such as ``train=0.9`` or ``test=1/10``.

    Raises:
        DataError: one cannot be read, a name comes twice, or they do not sum to 1.
    """
    shares: dict[str, Fraction] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            share = Fraction(value)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not PLAIN_NAME.fullmatch(name) or share <= 0:
            raise DataError(f"a part is a name and a share such as train=0.9, got {text!r}")
        if name in shares:
            raise DataError(f"each part has a name of its own, got {name} twice")
        shares[name] = share
    if sum(shares.values()) != 1:
        raise DataError(
            f"the shares of all parts sum to 1, {' + '.join(map(str, texts))} sum to "
            f"{float(sum(shares.values())):g}"
        )
    return shares


def sizes_of(num_samples: Sequence[int], shares: Shares) -> NDArray[np.int64]:
    """Share out the samples of several groups, each by itself.

    A part gets the whole number below its share of a group. What remains of the group goes, one
    sample each, to those parts that lack most of their share of all groups so far.

    Args:
        num_samples: of each group.
        shares: of the parts.

    Returns:
        ``(num_groups, num_parts)``; a row sums to the samples of its group.
    """
    owed = [Fraction(0)] * len(shares)
    sizes = []
    for count in num_samples:
        exact = [count * share for share in shares.values()]
        owed = [before + more for before, more in zip(owed, exact, strict=True)]
        given = [int(share) for share in exact]
        left = count - sum(given)
        lacking = sorted(range(len(given)), key=lambda part: given[part] - owed[part])
        for part in lacking[:left]:
            given[part] += 1
        owed = [before - less for before, less in zip(owed, given, strict=True)]
        sizes.append(given)
    return np.array(sizes, np.int64).reshape(-1, len(shares))


class Group:
    """Samples that are shared out together: all of them, or those with one value of a field."""

    def __init__(self, sizes: NDArray[np.int64], seed: int, number: int) -> None:
        """Draw the parts.

        Args:
            sizes: samples of each part.
            seed: of the split, in [0, 2^64).
            number: of the group.
        """
        self._ends = np.cumsum(sizes)
        self._order = global_order(int(self._ends[-1]), seed, _TAG + number)

    def part_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the part of some samples, which are counted within the group."""
        return np.searchsorted(self._ends, self._order.positions_of(samples), side="right")
