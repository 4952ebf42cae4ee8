"""Ids of rows: which are in which bag, how they spread over ranks, and what a new row holds."""

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.async_sgd.sharded_embedding_rules import Places

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Bags:
    """Which ids are in which bag, without padding."""

    def __init__(self, ids: NDArray[Any], offsets: Tensor | None, keep: NDArray[np.bool_]) -> None:
        if offsets is None:
            starts = np.arange(0, ids.size, ids.shape[1]) if ids.size else np.zeros(len(ids))
        else:
            starts = offsets.cpu().numpy()
        sizes = np.diff(np.append(starts, ids.size)).astype(np.int64)
        self.num, self.keep = len(sizes), keep
        self.number = np.repeat(np.arange(self.num), sizes)[keep]  # of the bag of each id
        self._sizes = np.bincount(self.number, minlength=self.num)
        self.offsets = np.cumsum(self._sizes) - self._sizes

    def counts(self, dtype: torch.dtype) -> Tensor:
        """Return ids per bag, at least 1, ``(bags, 1)``."""
        return torch.from_numpy(np.maximum(self._sizes, 1)[:, None]).to(dtype)


def spreading_factor(rows: int) -> int:
    """Return what spreads neighbours over all ranks: ``id * factor % rows`` is a permutation."""
    factor = max(1, round(rows * 0.6180339887498949))
    while math.gcd(factor, rows) != 1:
        factor += 1
    return factor


def first_rows(
    rows: Places, *, dim: int, seed: int, init: float, zero: int, dtype: torch.dtype
) -> Tensor:
    """Return rows as nobody has stepped them, ``(rows, dim)``, uniform in ``[-init, init)``.

    Each is a function of ``seed`` and its number alone; that of number ``zero`` is zero.
    """
    found = torch.empty(len(rows), dim, dtype=dtype)
    columns = np.arange(1, dim + 1, dtype=np.uint64) * _GOLDEN
    salt = _mixed(np.array([seed % (1 << 64)], np.uint64))
    size = max(1, (1 << 14) // dim)  # stays in the cache
    for at in range(0, len(rows), size):
        keys = _mixed((rows[at : at + size].astype(np.uint64) * _GOLDEN) ^ salt)
        bits = _mixed(keys[:, None] + columns[None, :]) >> np.uint64(11)
        uniform = bits.astype(np.float64) * (2 * init * 2.0**-53) - init
        found[at : at + size] = torch.from_numpy(uniform)
    found[torch.from_numpy(rows == zero)] = 0.0
    return found


def _mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return numbers that look random. Source: Steele, Lea and Flood 2014, SplitMix64."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
