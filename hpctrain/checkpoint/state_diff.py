"""The difference of two checkpoints, bit by bit."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint.export import part_of
from hpctrain.checkpoint.format.state_tree import walk
from hpctrain.checkpoint.inspection import load_newest
from hpctrain.comm.tensor_arguments import name_of

PRIVATE = "private"  # first component of the paths of private values: ``private/3/random``

NO_RESULTS = {"time", "records"}
"""Kinds of differences that runs with equal results may have."""

_NOTED = {"training_s": "time", "num_records": "records"}
"""Paths in the state of ``hpctrain train`` whose values are no results, with their kind."""
_SUMS = re.compile(rf"({PRIVATE}/\d+/)?(epoch_)?tally/sums")
_DURATIONS = slice(2, 5)  # indices of durations in the tensors that ``_SUMS`` names

_LONGEST = 60  # maximum characters of a plain value

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Difference:
    """A path at which two states differ, and a description of the difference."""

    path: str  # path of the tensor or plain value, such as ``model/0.weight``
    what: str
    """Kind of the difference: ``values``, ``shape``, ``dtype``, ``missing`` or ``plain``. The
    kinds ``time`` (measured durations) and ``records`` (number of records) are not results."""
    text: str  # human-readable, in one line
    num_different: int = 0  # elements whose bits differ; 0 unless ``what`` is ``values``
    max_abs: float = 0.0  # largest difference of two finite elements


def compare(a: Path | str, b: Path | str, only: Sequence[str] = ()) -> list[Difference]:
    """Return the differences of two checkpoints: tensors, plain values, then private values.

    Reads both checkpoints into memory. If a path is a run directory, its newest checkpoint is
    compared. If ``only`` names parts of the state, other parts and private values are omitted.
    Raises ``CheckpointError``: a checkpoint cannot be read, or lacks a part.
    """
    mine, theirs = _read(a, only), _read(b, only)
    return [replace(one, what=_kind_of(one, mine, theirs)) for one in differences(mine, theirs)]


def _read(path: Path | str, only: Sequence[str]) -> dict[str, Any]:
    _, loaded = load_newest(path)
    if only:
        parts = [leaves(part_of(loaded.state, part), part) for part in only]
    else:
        own = [leaves(of_rank, PRIVATE, str(rank)) for rank, of_rank in loaded.private.items()]
        parts = [leaves(loaded.state), *own]
    return {path: value for part in parts for path, value in part.items()}


def leaves(state: object, *at: str) -> dict[str, Any]:
    """Return the tensors of a state by path, then its plain values and empty containers."""
    found = {
        path: value
        for path, value in walk(state, at)
        if not isinstance(value, Mapping | list | tuple) or not value
    }
    return dict(sorted(found.items(), key=lambda item: not isinstance(item[1], Tensor)))


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield the differences of values by path: in the order of ``a``, then paths only in ``b``.

    Bits are compared: NaNs of equal bits are the same, but 0.0 and -0.0 differ, as do 1 and 1.0.
    """
    for path, value in a.items():
        if path not in b:
            yield Difference(path, "missing", f"{path}: {_described(value)} in A, not in B")
        elif isinstance(value, Tensor) and isinstance(b[path], Tensor):
            yield from _of_tensors(path, value.detach(), b[path].detach())
        elif not _is_same(value, b[path]):
            yield Difference(
                path, "plain", f"{path}: {_described(value)}, and {_described(b[path])}"
            )
    for path, value in b.items():
        if path not in a:
            yield Difference(path, "missing", f"{path}: {_described(value)} in B, not in A")


def _kind_of(found: Difference, a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return the kind of a difference between two states, such as ``values`` or ``time``."""
    path = found.path
    if found.what == "plain":
        return _NOTED.get(path, found.what)
    if found.what == "values" and _SUMS.fullmatch(path):
        x, y = a[path].clone(), b[path].clone()
        x[_DURATIONS] = y[_DURATIONS] = 0
        return found.what if any(_of_tensors(path, x, y)) else "time"
    return found.what


def _described(value: object) -> str:
    if isinstance(value, Tensor):
        return f"{name_of(value.dtype)} {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _is_same(a: object, b: object) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return a.hex() == b.hex()  # 0.0 and -0.0 differ, and nan equals itself
    return type(a) is type(b) and a == b


def _of_tensors(path: str, a: Tensor, b: Tensor) -> Iterator[Difference]:
    for what in ("shape", "dtype"):
        if getattr(a, what) != getattr(b, what):
            yield Difference(path, what, f"{path}: {_described(a)}, and {_described(b)}")
            return
    # Compare the real and the imaginary part separately.
    x, y = (_real(each).contiguous().reshape(a.numel(), 1 + a.is_complex()) for each in (a, b))
    bits = _BITS[x.element_size()]
    unequal = (x.view(bits) != y.view(bits)).any(dim=1)
    if not unequal.any():
        return
    count, max_abs = int(unequal.sum()), _gap(x[unequal], y[unequal])
    index = tuple(map(int, np.unravel_index(int(unequal.int().argmax()), a.shape)))
    text = (
        f"{path} {_described(a)}: {count} of {a.numel()} elements differ by at most {max_abs:.6g}"
        f"; the first is {list(index)}: {_described(a[index].item())}, and "
        f"{_described(b[index].item())}"
    )
    yield Difference(path, "values", text, count, max_abs)


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _gap(a: Tensor, b: Tensor) -> float:
    """Return the largest finite difference of elements of ``a`` and ``b`` at equal positions."""
    if not a.dtype.is_floating_point:
        # Use Python integers, because differences of uint64 fit no dtype of torch.
        pairs = zip(a.flatten().tolist(), b.flatten().tolist(), strict=True)
        return float(max(abs(int(x) - int(y)) for x, y in pairs))
    gaps = (a.double() - b.double()).abs()
    gaps = gaps[gaps.isfinite()]
    return float(gaps.max()) if gaps.numel() else 0.0
