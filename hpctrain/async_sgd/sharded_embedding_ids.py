"""Checks of the arguments and ids of a table, bags of ids, and initial values of rows."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.async_sgd.sharded_embedding_rows import Places
from hpctrain.core.checks import Finite0, checked, require
from hpctrain.core.errors import ConfigError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MOST_ROWS = 1 << 31
_DTYPES = (torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def check_shape(rows: object, dim: object, mode: object, padding_idx: object) -> None:
    """Raise ``ConfigError`` unless the arguments define a table."""
    if type(rows) is not int or type(dim) is not int or not (0 < rows < _MOST_ROWS and dim > 0):
        raise ConfigError(
            f"rows must be an integer from 1 to {_MOST_ROWS - 1} and dim an integer of at least "
            f"1, got rows={rows!r}, dim={dim!r}; convert other numbers by int()"
        )
    if mode not in (None, "sum", "mean"):
        raise ConfigError(f"mode must be None, sum or mean, got {mode!r}")
    is_row = isinstance(padding_idx, int) and 0 <= padding_idx < rows
    if padding_idx is not None and not is_row:
        raise ConfigError(
            f"padding_idx must be an id from 0 to {rows - 1}, got {padding_idx!r}; leave it out "
            f"for no padding"
        )


def check_storage(folder: Path | None, cache: tuple[int, int]) -> None:
    """Raise ``ConfigError`` unless the folder exists and the sizes of the cache are valid."""
    if folder is not None and not folder.is_dir():
        raise ConfigError(
            f"path must be an existing folder on each node, but there is no {folder}; make it"
        )
    are_numbers = all(type(num) is int and num >= 0 for num in cache)
    require(are_numbers, "cache_rows and cache_steps must be integers of at least 0", cache)
    require(cache[0] > 0 or not cache[1], "cache_rows must be above 0 with cache_steps", cache)


def check_ids(ids: object, offsets: object, num_rows: int, mode: str | None) -> None:
    """Raise ``ConfigError`` unless ids and offsets are valid for a table of ``num_rows``."""
    ids = _integers(ids, "ids")
    if ids.numel():
        low, high = map(int, torch.aminmax(ids))
        if low < 0 or high >= num_rows:
            wrong = low if low < 0 else high
            raise ConfigError(
                f"ids of a table of {num_rows} rows must be from 0 to {num_rows - 1}, got "
                f"{wrong}; use other ids, or make the table larger"
            )
    if mode is None or offsets is None:
        if offsets is not None or (mode is not None and ids.dim() != 2):
            raise ConfigError(
                "ids of a table with a mode must be 2-D, or 1-D with offsets, and a table without "
                f"a mode takes no offsets, got ids of shape {list(ids.shape)} with mode={mode}; "
                f"set mode, or leave offsets out"
            )
        return
    offsets = _integers(offsets, "offsets")
    if offsets.dim() != 1 or ids.dim() != 1:
        raise ConfigError(
            f"ids and offsets of bags must be 1-D, got shapes {list(ids.shape)} and "
            f"{list(offsets.shape)}; use ids.flatten()"
        )
    ends = [*offsets.tolist(), len(ids)]
    if ends[0] != 0 or ends != sorted(ends):
        raise ConfigError(
            f"offsets must begin at 0, not decrease, and be at most {len(ids)}, got "
            f"{ends[:-1][:9]}; use the first position of each bag in ids"
        )


def _integers(value: object, what: str) -> Tensor:
    """Return ``value``; raise ``ConfigError`` unless it is a dense tensor of integers."""
    if not isinstance(value, Tensor):
        refusal = f"{type(value).__name__}; use torch.tensor({what})"
    elif value.layout is not torch.strided:
        refusal = f"a tensor of layout {value.layout}; use {what}.to_dense()"
    elif value.dtype not in _INTEGERS:
        refusal = f"{value.dtype}; {what} must be int32, int64 or uint8; use {what}.long()"
    else:
        return value
    raise ConfigError(f"{what} must be a dense tensor of integers, got {refusal}")


class Bags:
    """Assignment of ids to bags, without the ids of padding.

    Args:
        ids: ids of all bags.
        offsets: first position of each bag in ``ids``; None for ``ids`` of shape ``(bags, ids per
            bag)``.
        keep: mask of the ids that are not padding.
    """

    def __init__(self, ids: NDArray[Any], offsets: Tensor | None, keep: NDArray[np.bool_]) -> None:
        if offsets is None:
            starts = np.arange(0, ids.size, ids.shape[1]) if ids.size else np.zeros(len(ids))
        else:
            starts = offsets.cpu().numpy()
        sizes = np.diff(np.append(starts, ids.size)).astype(np.int64)
        self.num, self.keep = len(sizes), keep
        self.number = np.repeat(np.arange(self.num), sizes)[keep]  # index of the bag of each id
        self._sizes = np.bincount(self.number, minlength=self.num)
        self.offsets = np.cumsum(self._sizes) - self._sizes

    def counts(self, dtype: torch.dtype) -> Tensor:
        """Return the number of ids per bag, at least 1, as divisor of means: ``(bags, 1)``."""
        return torch.from_numpy(np.maximum(self._sizes, 1)[:, None]).to(dtype)


class IdSpread:
    """Permutation ``id * factor % rows`` that spreads consecutive ids over the ranks.

    Args:
        num_rows: number of rows of the table.
        padding_idx: id of the row that remains zero; None for no padding.
    """

    def __init__(self, num_rows: int, padding_idx: int | None) -> None:
        self.num_rows, self.padding_idx = num_rows, padding_idx
        self.factor = max(1, round(num_rows * 0.6180339887498949))
        while math.gcd(self.factor, num_rows) != 1:
            self.factor += 1
        self.padding = -1 if padding_idx is None else padding_idx * self.factor % num_rows
        """The row of ``padding_idx``; -1 without padding."""

    def rows_of(self, ids: NDArray[Any]) -> Places:
        """Return the row numbers of ids, as a flat array."""
        numbers = ids.ravel().astype(np.int64)
        numbers *= self.factor
        numbers -= numbers // self.num_rows * self.num_rows  # twice as fast as %
        return numbers


@dataclass(frozen=True, kw_only=True)
class FirstRows:
    """Initial values of rows, uniform in ``[-init, init)``.

    The values of a row depend on ``seed`` and the row number only; row ``zero`` is zero.
    """

    dim: int
    init: float
    seed: int
    dtype: torch.dtype
    zero: int

    def __post_init__(self) -> None:
        checked("init", self.init, Finite0)
        checked("seed", self.seed, int)
        if self.dtype not in _DTYPES:
            raise ConfigError(f"dtype must be torch.float32 or torch.float64, got {self.dtype}")

    def __str__(self) -> str:
        return f"init={float(self.init)}, seed={self.seed}, dtype={self.dtype}"

    def values(self, rows: Places) -> Tensor:
        """Return the initial values of rows, ``(len(rows), dim)``."""
        found = torch.empty(len(rows), self.dim, dtype=self.dtype)
        columns = np.arange(1, self.dim + 1, dtype=np.uint64) * _GOLDEN
        salt = _mixed(np.array([self.seed % (1 << 64)], np.uint64))
        size = max(1, (1 << 14) // self.dim)  # a block fits into the cache of a core
        for at in range(0, len(rows), size):
            keys = _mixed((rows[at : at + size].astype(np.uint64) * _GOLDEN) ^ salt)
            bits = _mixed(keys[:, None] + columns[None, :]) >> np.uint64(11)
            uniform = bits.astype(np.float64) * (2 * self.init * 2.0**-53) - self.init
            found[at : at + size] = torch.from_numpy(uniform)
        found[torch.from_numpy(rows == self.zero)] = 0.0
        return found


def _mixed(keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return pseudorandom bits of each key. Source: Steele, Lea and Flood 2014, SplitMix64."""
    keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return keys ^ (keys >> np.uint64(31))
