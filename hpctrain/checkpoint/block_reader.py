"""Reads of stored tensors: one rank of each node reads a block, and its peers copy the block."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from hpctrain.checkpoint.format.manifest import StoredPart, file_name
from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.checkpoint.format.tensor_file import BLOCK_BYTES, DTYPES, opened
from hpctrain.checkpoint.refusal import explained
from hpctrain.comm.tensor_arguments import host_bytes
from hpctrain.core.errors import CheckpointError

if TYPE_CHECKING:
    from hpctrain.comm.node.shared_memory import SharedMemory


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A stored part of a tensor, and the piece of this rank that needs elements of the part."""

    name: str
    dtype: str
    part: StoredPart
    piece: TensorPiece | None = None  # None if this rank needs no elements

    @property
    def num_bytes(self) -> int:
        """Bytes of the part."""
        return self.part.shard.numel * DTYPES[self.dtype].itemsize

    @property
    def common(self) -> Shard | None:
        """Elements of the part that this rank needs; None if there are none."""
        return self.part.shard.intersection(self.piece.shard) if self.piece else None


class _Block(NamedTuple):
    number: int  # index among the blocks of all parts
    part: int  # index in the list ``stored``
    start: int  # first byte in the part
    num_bytes: int


def read(directory: Path, stored: Sequence[StoredTensor], node: "SharedMemory | None") -> None:
    """Fill the pieces of ``stored`` with the elements in the files of a checkpoint.

    Without ``node``, this rank reads the blocks that contain its elements. With ``node``, the call
    is collective over the node: the ranks divide the blocks that any of them needs, so each block
    is read and checked once, and a rank opens only the files of the blocks that it reads. The
    other ranks copy the blocks from node memory, which has room for two blocks per rank.

    Args:
        directory: directory of the checkpoint.
        stored: stored parts, grouped by file; the same parts in the same order on all ranks of
            the node.
        node: memory of the node.

    Raises:
        CheckpointError: a file is damaged or cannot be read; on every rank of the node.
    """
    target = _Target(stored)
    with ExitStack() as stack:
        source = _Source(directory, stored, stack)
        if node is not None and node.local_size > 1:
            _read_together(source, target, node)
            return
        with explained(source.what):
            for block in target.blocks():
                source.read(block, target.memory_of(block))
                target.confirm(block)


def _read_together(source: "_Source", target: "_Target", node: "SharedMemory") -> None:
    target.add_needs(node.gather(target.needs()))
    rounds = _rounds(target.blocks(), node.local_size)
    ends = (first + block.num_bytes for slots in rounds for _, first, block in slots)
    half_bytes = max(ends, default=1)
    segments = [memoryview(one).cast("B") for one in node.allocate(2 * half_bytes)]
    failures: list[str] = []

    @contextmanager
    def without_raising() -> Iterator[None]:
        # After a failure, this rank still passes the barriers of the other ranks.
        try:
            with explained(source.what):
                yield
        except CheckpointError as error:
            failures.append(str(error))

    for number, slots in enumerate(rounds):
        # This half is overwritten after the next barrier, before which all ranks have copied it.
        memory = [segment[number % 2 * half_bytes :] for segment in segments]
        with without_raising():
            for reader, first, block in slots:
                if reader == node.local_rank and not failures:
                    source.read(block, memory[reader][first : first + block.num_bytes])
        node.barrier()
        with without_raising():
            for reader, first, block in slots:
                if target.takes(block) and not failures:
                    data = memory[reader][first : first + block.num_bytes]
                    target.memory_of(block)[:] = data
                    target.confirm(block)
    if found := [text for text in node.gather("".join(failures[:1])) if text]:
        raise CheckpointError(found[0])


def _rounds(blocks: Iterator[_Block], num_readers: int) -> list[list[tuple[int, int, _Block]]]:
    """Return the blocks of each round as ``(local rank that reads, offset in memory, block)``.

    Each reader reads about the same number of consecutive bytes, but at least ``BLOCK_BYTES``, so
    that with few blocks some ranks read none. In one round it reads at most ``BLOCK_BYTES``.
    """
    ordered = list(blocks)
    share = max(-(-sum(block.num_bytes for block in ordered) // num_readers), BLOCK_BYTES)
    rounds: list[list[tuple[int, int, _Block]]] = []
    reader, number, used, start = 0, 0, 0, 0
    for block in ordered:
        if start >= (reader + 1) * share:
            reader, number, used = reader + 1, 0, 0
        elif used + block.num_bytes > BLOCK_BYTES:
            number, used = number + 1, 0
        if number == len(rounds):
            rounds.append([])
        rounds[number].append((reader, used, block))
        used += block.num_bytes
        start += block.num_bytes
    return rounds


class _Source:
    """Files of a checkpoint, of which one is open at a time."""

    def __init__(self, directory: Path, stored: Sequence[StoredTensor], stack: ExitStack) -> None:
        self.what = f"read checkpoint {directory}"
        self._directory, self._stored, self._stack = directory, stored, stack
        self._open: int | None = None  # first rank of the open file

    def read(self, block: _Block, memory: memoryview) -> None:
        """Fill ``memory`` with a block, and compare its checksum."""
        one = self._stored[block.part]
        if self._open != one.part.file:
            self._stack.close()
            self._open = None
            path = self._directory / file_name(one.part.file)
            self._file = self._stack.enter_context(opened(path))
            self._open = one.part.file
        entry = one.part.entry(one.name)
        self._file.check(entry, one.dtype, one.part.shard.shape)
        self._file.read_into(entry, block.start, memory, one.part.crcs)


class _Sink(NamedTuple):
    """Memory for the bytes of a part that this rank needs, and the elements to copy to a piece."""

    memory: memoryview
    first: int  # offset in the part of the first byte of ``memory``
    elements: Tensor | None  # elements in ``memory``; None if ``memory`` is that of the piece
    place: Tensor  # view of the piece, to which the elements are copied


class _Target:
    """Blocks that this rank needs, and the memory for them."""

    def __init__(self, stored: Sequence[StoredTensor]) -> None:
        self._stored = stored
        self._bounds = list(accumulate((len(one.part.crcs) for one in stored), initial=0))
        self._takes = np.zeros(self._bounds[-1], bool)
        self._num_left = [0] * len(stored)  # blocks of each part that have not been read
        for part, one in enumerate(stored):
            if one.common:
                first, last = self._range(one)
                self._takes[self._bounds[part] + first : self._bounds[part] + last] = True
                self._num_left[part] = last - first
        self._is_read = self._takes
        self._sinks: dict[int, _Sink] = {}

    def needs(self) -> bytes:
        """Return one bit for each block, packed: 1 if this rank needs the block."""
        return np.packbits(self._takes).tobytes()

    def add_needs(self, of_ranks: Sequence[bytes]) -> None:
        """Let ``blocks`` also yield the blocks that only other ranks of the node need."""
        bits = np.bitwise_or.reduce([np.frombuffer(one, np.uint8) for one in of_ranks])
        self._is_read = np.unpackbits(bits)

    def blocks(self) -> Iterator[_Block]:
        """Yield the blocks to read, in the order of the files."""
        numbers = np.flatnonzero(self._is_read)
        parts = np.searchsorted(self._bounds, numbers, side="right") - 1
        for number, part in zip(numbers.tolist(), parts.tolist(), strict=True):
            start = (number - self._bounds[part]) * BLOCK_BYTES
            num_bytes = min(BLOCK_BYTES, self._stored[part].num_bytes - start)
            yield _Block(number, part, start, num_bytes)

    def takes(self, block: _Block) -> bool:
        """Return whether this rank needs a block."""
        return bool(self._takes[block.number])

    def memory_of(self, block: _Block) -> memoryview:
        """Return the memory for a block that this rank needs."""
        if block.part not in self._sinks:
            self._sinks[block.part] = self._sink(self._stored[block.part])
        sink = self._sinks[block.part]
        return sink.memory[block.start - sink.first :][: block.num_bytes]

    def confirm(self, block: _Block) -> None:
        """Record that ``memory_of(block)`` is filled; after the last block, fill the piece."""
        self._num_left[block.part] -= 1
        if not self._num_left[block.part]:
            sink = self._sinks.pop(block.part)
            if sink.elements is not None:
                sink.place.copy_(sink.elements)

    def _range(self, one: StoredTensor) -> tuple[int, int]:
        """Return the needed blocks as a range of indices in the part: first, and last plus 1."""
        assert one.common
        first, last = one.part.shard.span(one.common)
        itemsize = DTYPES[one.dtype].itemsize
        return first * itemsize // BLOCK_BYTES, -(-last * itemsize // BLOCK_BYTES)

    def _sink(self, one: StoredTensor) -> _Sink:
        common, piece, shard = one.common, one.piece, one.part.shard
        assert common
        assert piece
        place = piece.tensor[piece.shard.slices(common)]
        if common == shard and place.is_contiguous():
            return _Sink(host_bytes(place), 0, None, place)
        first, last = (number * BLOCK_BYTES for number in self._range(one))
        itemsize = place.itemsize
        around = torch.empty((min(last, one.num_bytes) - first) // itemsize, dtype=place.dtype)
        strides = torch.empty(shard.shape, device="meta").stride()
        start = shard.span(common)[0] - first // itemsize
        elements = around.as_strided(common.shape, strides, start)
        return _Sink(host_bytes(around), first, elements, place)
