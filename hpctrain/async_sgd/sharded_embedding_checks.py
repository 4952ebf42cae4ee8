"""Checks of a table: what it may be made of, what may be looked up, and what is one step."""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from hpctrain.async_sgd.sharded_embedding_rows import Told
from hpctrain.comm.agreement import by_rank
from hpctrain.core.errors import ConfigError, MismatchError

_MOST_ROWS = 1 << 31
_DTYPES = (torch.float32, torch.float64)
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.uint8, torch.int8)
IS_COUNTED, IS_FROZEN = 1, 2
"""Flags of a step."""


def check_table(  # noqa: PLR0913, PLR0917 - what a table is given
    rows: object,
    dim: object,
    mode: object,
    padding_idx: object,
    init: object,
    seed: object,
    dtype: torch.dtype,
    folder: Path | None,
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


def check_ids(ids: object, offsets: object, num_rows: int, mode: str | None) -> None:
    """Return if these can be looked up in so many rows. Raises ``ConfigError``: they cannot."""
    ids = _integers(ids, "ids")
    if ids.numel():
        low, high = int(ids.min()), int(ids.max())
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


def require_alike(told: Sequence[Told]) -> None:
    """Raise ``MismatchError`` unless what all ranks tell of a step is one step."""
    if len({each.lr for each in told}) > 1:
        raise MismatchError(
            f"the lr of a table must be the same on every rank, since owners step their rows by "
            f"it, got {by_rank([str(each.lr) for each in told])}; set it alike"
        )
    for flag, what in (
        (IS_COUNTED, "set_num_samples of a table must be called"),
        (IS_FROZEN, "requires_grad_(False) of a table must be called"),
    ):
        num = sum(each.flags & flag != 0 for each in told)
        if num not in (0, len(told)):
            raise MismatchError(
                f"{what} by all ranks or by none, {num} of {len(told)} have called it; call it on "
                f"every rank"
            )
