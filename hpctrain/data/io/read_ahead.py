"""Reading ahead: blocks come into memory, and are checked, before samples of them are taken."""

import os
from concurrent.futures import Executor, Future
from functools import partial

import numpy as np

from hpctrain.core.units import KIB, MIB
from hpctrain.data.io.shardfile import ShardFile
from hpctrain.data.io.values import Array

THREADS = 4
"""While one looks at what it has read, others keep the disk busy."""
_PIECE_BYTES = 4 * MIB
"""Of blocks that one thread reads in a row."""
_REQUEST_BYTES = 128 * KIB
"""Linux reads no more than its read-ahead window for one request, 128 KiB unless it was set."""
_GAP_BYTES = 16 * KIB


def read_ahead(threads: Executor, file: ShardFile, rows: Array, *, check: bool) -> None:
    """Let threads bring rows of a file into memory, in its order, and return at once.

    ``check`` brings the whole of their blocks, and checks those that are new; who takes samples
    waits for it by ``wait_for``. What is wrong is left to him.
    """
    if file.was_cached or not len(rows):
        return
    if not check:
        threads.submit(_advise, file, *runs_of(distinct(rows)))
        return
    blocks = distinct(rows // file.block_size)
    is_new = ~file.checked[blocks]
    threads.submit(_advise_blocks, file, blocks[~is_new])
    new = blocks[is_new]
    num_pieces = min(len(new), -(-len(new) * file.block_bytes // _PIECE_BYTES))
    for piece in np.array_split(new, num_pieces) if num_pieces else []:
        numbers = piece.tolist()
        future = threads.submit(_bring, file, piece)
        file.coming.update(dict.fromkeys(numbers, future))
        future.add_done_callback(partial(_arrived, file, numbers))


def wait_for(file: ShardFile, blocks: Array) -> None:
    """Return when none of these blocks is on its way."""
    for block in blocks.tolist():
        if (future := file.coming.get(block)) is not None:
            future.exception()


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


def _bring(file: ShardFile, blocks: Array) -> None:
    # What is asked for here comes in small pages, which a map then takes one by one.
    if not file.is_mapped:
        _advise_blocks(file, blocks)
    file.bring(blocks)


def _arrived(file: ShardFile, blocks: list[int], future: "Future[None]") -> None:
    for block in blocks:
        if file.coming.get(block) is future:
            file.coming.pop(block, None)


def _advise_blocks(file: ShardFile, blocks: Array) -> None:
    """Ask the disk for blocks, which grow, maybe none."""
    if len(blocks):
        starts, stops = runs_of(blocks)
        size = file.block_size
        _advise(file, starts * size, np.minimum(stops * size, file.shard.num_samples))


def _advise(file: ShardFile, starts: Array, stops: Array) -> None:
    """Ask the disk for the samples ``[starts[i], stops[i])``, which grow, all at the same time."""
    for begins, ends in file.extents(starts, stops):
        start = stop = 0
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            if begin > stop + _GAP_BYTES:
                _request(file.descriptor, start, stop)
                start = begin
            stop = max(stop, end)
        _request(file.descriptor, start, stop)


def _request(descriptor: int, start: int, stop: int) -> None:
    for piece in range(start, stop, _REQUEST_BYTES):
        size = min(_REQUEST_BYTES, stop - piece)
        os.posix_fadvise(descriptor, piece, size, os.POSIX_FADV_WILLNEED)
