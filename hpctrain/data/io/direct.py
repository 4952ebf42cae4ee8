"""Bytes of a file straight to their place in a batch: in the order of the file, few calls."""

import errno
import os
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.units import MIB

_MAX_BUFFERS = 512
_MAX_BYTES = 8 * MIB


def read_pieces(descriptor: int, pieces: Iterable[tuple[int, int, int]], out: memoryview) -> None:
    """Copy pieces of a file: of each ``(offset, size, place)``, to ``out[place:place + size]``.

    Pieces that touch in the file are read by one call, whatever their places.

    Raises:
        OSError: the file cannot be read, or ends before (EIO).
    """
    run: list[memoryview] = []
    start = stop = 0
    for offset, size, place in sorted(pieces):
        if offset != stop or len(run) == _MAX_BUFFERS or stop - start > _MAX_BYTES:
            if run:
                read_into(descriptor, run, start, stop - start)
            run, start = [], offset
        run.append(out[place : place + size])
        stop = offset + size
    if run:
        read_into(descriptor, run, start, stop - start)


def read_at(descriptor: int, offset: int, num_bytes: int) -> NDArray[np.uint8]:
    """Return bytes of a file.

    Raises:
        OSError: the file cannot be read, or ends before (EIO).
    """
    out = np.empty(num_bytes, np.uint8)
    if num_bytes:
        read_into(descriptor, [out.data], offset, num_bytes)
    return out


def read_into(descriptor: int, buffers: Sequence[memoryview], offset: int, num_bytes: int) -> None:
    """Fill buffers, ``num_bytes`` in all, with what lies one after another in a file.

    Raises:
        OSError: the file cannot be read, or ends before (EIO).
    """
    done = os.preadv(descriptor, buffers, offset)
    while done < num_bytes:
        # Rare: a signal, or more than 2 GiB at once.
        rest, skip = [], done
        for buffer in buffers:
            rest.append(buffer[min(skip, len(buffer)) :])
            skip -= min(skip, len(buffer))
        count = os.preadv(descriptor, rest, offset + done)
        if not count:
            raise OSError(errno.EIO, "the file ends before its data")
        done += count
