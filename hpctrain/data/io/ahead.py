"""Reading ahead: the system is told what will be wanted, in pieces that it does not cut short."""

import os

import numpy as np

from hpctrain.core.units import KIB
from hpctrain.data.io.values import Array

_PIECE_BYTES = 128 * KIB
"""Linux reads no more than its read-ahead window for one request, 128 KiB unless it was set."""
_GAP_BYTES = 16 * KIB


def runs_of(numbers: Array) -> tuple[Array, Array]:
    """Return the starts and stops of the runs of consecutive numbers, which grow."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    starts = numbers[np.concatenate(([0], cuts))]
    stops = numbers[np.concatenate((cuts, [len(numbers)])) - 1] + 1
    return starts, stops


def distinct(numbers: Array) -> Array:
    """Return each number once, in order: what ``np.unique`` does, fast where they grow."""
    steps = np.diff(numbers)
    if (steps < 0).any():
        return np.unique(numbers)
    return numbers[np.concatenate(([True], steps > 0))]


def advise(descriptor: int, begins: Array, ends: Array) -> None:
    """Ask the system to bring parts of a file into memory.

    Args:
        descriptor: of the file.
        begins: ``(num_parts,)``, the first byte of each part.
        ends: behind the last byte of each part.
    """
    order = np.argsort(begins, kind="stable")
    start = stop = 0
    for begin, end in zip(begins[order].tolist(), ends[order].tolist(), strict=True):
        if begin > stop + _GAP_BYTES:
            _ask(descriptor, start, stop)
            start = begin
        stop = max(stop, end)
    _ask(descriptor, start, stop)


def _ask(descriptor: int, start: int, stop: int) -> None:
    for piece in range(start, stop, _PIECE_BYTES):
        size = min(_PIECE_BYTES, stop - piece)
        os.posix_fadvise(descriptor, piece, size, os.POSIX_FADV_WILLNEED)
