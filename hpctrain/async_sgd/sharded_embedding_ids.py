"""Arguments of a table and ids: which are valid, in which bag, how ids spread, what rows hold."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.async_sgd.sharded_embedding_rows import Places
from hpctrain.core.checks import require
from hpctrain.core.errors import ConfigError

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MOST_ROWS = 1 << 31
_DTYPES = (torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)


def check_table(  # noqa: PLR0913, PLR0917 - what a table is given
    rows: object,
    dim: object,
    mode: object,
    padding_idx: object,
    init: object,
    seed: object,
    dtype: torch.dtype,
    folder: Path | None,
    cache: tuple[int, int],
) -> None:
    """Return if a table can be made so. Raises ``ConfigError``: it cannot."""
    if type(rows) is not int or type(dim) is not int or not (0 < rows < _MOST_ROWS and dim > 0):
        raise ConfigError(
            f"rows is a whole number from 1 to {_MOST_ROWS - 1}, dim one of at least 1, got "
            f"rows={rows!r}, dim={dim!r}; use int()"
        )
    if mode not in (None, "sum", "mean"):
        raise ConfigError(f"mode is None, sum or mean, got {mode!r}")
    is_row = isinstance(padding_idx, int) and 0 <= padding_idx < rows
    if padding_idx is not None and not is_row:
        raise ConfigError(f"padding_idx is a row from 0 to {rows - 1}, got {padding_idx!r}")
    if not isinstance(init, int | float) or not 0 <= init < math.inf:
        raise ConfigError(f"init is a number of at least 0, got {init!r}")
    if not isinstance(seed, int):
        raise ConfigError(f"seed is a whole number, got {seed!r}")
    if dtype not in _DTYPES:
        raise ConfigError(f"rows are torch.float32 or float64, got {dtype}")
    if folder is not None and not folder.is_dir():
        raise ConfigError(f"path is a folder of each node, there is no {folder}; make it first")
    are_numbers = all(type(num) is int and num >= 0 for num in cache)
    require(are_numbers, "cache_rows and cache_steps are whole numbers of at least 0", cache)
    require(cache[0] > 0 or not cache[1], "cache_steps counts for copies; set cache_rows", cache)


def check_ids(ids: object, offsets: object, num_rows: int, mode: str | None) -> None:
    """Return if these can be looked up in so many rows. Raises ``ConfigError``: they cannot."""
    ids = _integers(ids, "ids")
    if ids.numel():
        low, high = map(int, torch.aminmax(ids))
        if low < 0 or high >= num_rows:
            wrong = low if low < 0 else high
            raise ConfigError(
                f"ids of a table of {num_rows} rows are from 0 to {num_rows - 1}, got {wrong}; "
                f"look up other ids, or make the table larger"
            )
    if mode is None or offsets is None:
        if offsets is not None or (mode is not None and ids.dim() != 2):
            raise ConfigError(
                f"bags are 2-D ids, or 1-D ones with offsets, in a table with a mode, got ids of "
                f"shape {list(ids.shape)} with mode={mode}"
            )
        return
    offsets = _integers(offsets, "offsets")
    if offsets.dim() != 1 or ids.dim() != 1:
        raise ConfigError(
            f"ids and offsets of bags are 1-D, got shapes {list(ids.shape)} and "
            f"{list(offsets.shape)}; use ids.flatten()"
        )
    ends = [*offsets.tolist(), len(ids)]
    if ends[0] != 0 or ends != sorted(ends):
        raise ConfigError(f"offsets begin at 0, never fall, and end in {len(ids)} ids: {ends[:9]}")


def _integers(value: object, what: str) -> Tensor:
    """Return a dense tensor of integers. Raises ``ConfigError``: it is none."""
    if not isinstance(value, Tensor):
        refusal = f"{type(value).__name__}; use torch.tensor({what})"
    elif value.layout is not torch.strided:
        refusal = f"a {value.layout} one; use {what}.to_dense()"
    elif value.dtype not in _INTEGERS:
        refusal = f"{value.dtype}; {what} are int32, int64 or uint8; use {what}.long()"
    else:
        return value
    raise ConfigError(f"{what} are a dense tensor of integers, got {refusal}")


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


def spread(ids: NDArray[Any], factor: int, rows: int) -> Places:
    """Return ``ids * factor % rows``, flat."""
    numbers = ids.ravel().astype(np.int64)
    numbers *= factor
    numbers -= numbers // rows * rows  # in half the time of %
    return numbers


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
