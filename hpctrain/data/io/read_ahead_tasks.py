"""What brings blocks of a file into memory: pieces of work for several threads, in order."""

from collections.abc import Callable
from functools import partial

import numpy as np

from hpctrain.core.units import MIB
from hpctrain.data.io.ahead import advise, runs_of
from hpctrain.data.io.plain_blocks import READ_BYTES
from hpctrain.data.io.read_ahead_queue import Piece
from hpctrain.data.io.shardfile import ShardFile
from hpctrain.data.io.values import Array

_APART_BYTES = 4 * MIB
"""Of blocks that lie apart, in one piece of work: they are read one by one anyhow."""
_SWEPT_BYTES = 64 * MIB
"""Of a file that is swept, read on by one call."""


def pieces_of_old(file: ShardFile, blocks: Array) -> list[Piece]:
    """Return what brings blocks that were checked before; ``blocks`` grow, maybe none."""
    return [Piece(lambda: _ask_for_runs(file, blocks))] if len(blocks) else []


def pieces_of_new(file: ShardFile, blocks: Array, bring: Callable[[Array], None]) -> list[Piece]:
    """Return what brings and checks blocks.

    Args:
        file: has them.
        blocks: growing, maybe none.
        bring: does so with some of them: ``file.bring``, or what does more.
    """
    if file.is_swept:
        parts = _cut(file, blocks, _SWEPT_BYTES)
        checks = [Piece(partial(bring, part)) for part in _cut(file, blocks, READ_BYTES)]
        return [*(Piece(partial(_sweep, file, part), is_sweep=True) for part in parts), *checks]
    # Of blocks that lie apart, the disk has many to find at the same time.
    num_runs = len(runs_of(blocks)[0]) if len(blocks) else 0
    if num_runs * MIB > len(blocks) * file.block_bytes:
        return [
            Piece(partial(bring, part), partial(_ask_for_runs, file, part))
            for part in _cut(file, blocks, _APART_BYTES)
        ]
    return [Piece(partial(bring, part)) for part in _cut(file, blocks, READ_BYTES)]


def ask_for(file: ShardFile, starts: Array, stops: Array) -> None:
    """Ask for the samples ``[starts[i], stops[i])``; of a file that is swept, wait for them."""
    for name in file.read_on:
        begins, ends = file.extents(name, starts, stops)
        parts = zip(begins.tolist(), ends.tolist(), strict=True)
        if not (
            file.is_swept
            and file.space
            and all(file.space.bring(begin, end - begin) for begin, end in parts)
        ):
            advise(file.descriptor, begins, ends)


def _sweep(file: ShardFile, blocks: Array) -> None:
    """Read on without a gap, while other threads check what has come."""
    _ask_for_blocks(file, blocks[:1], blocks[-1:] + 1)


def _ask_for_runs(file: ShardFile, blocks: Array) -> None:
    _ask_for_blocks(file, *runs_of(blocks))


def _ask_for_blocks(file: ShardFile, starts: Array, stops: Array) -> None:
    """Ask for the samples of the blocks ``[starts[i], stops[i])``."""
    size = file.block_size
    ask_for(file, starts * size, np.minimum(stops * size, file.shard.num_samples))


def _cut(file: ShardFile, blocks: Array, num_bytes: int) -> list[Array]:
    """Cut blocks into parts of about so many bytes each."""
    num_parts = min(len(blocks), -(-len(blocks) * file.block_bytes // num_bytes))
    return np.array_split(blocks, num_parts) if num_parts else []
