"""A shuffled order that reads whole blocks: samples are mixed inside a moving window of blocks.

Each block of neighbouring samples belongs to one lane, the same in all epochs. Consecutive
positions of an epoch belong to different lanes. Each lane has a separate order of its blocks, and
mixes the samples of ``window`` blocks at a time. So a batch mixes ``lanes * window`` blocks, and a
rank that reads some of the lanes reads the same part of the data in every epoch.

Samples whose blocks do not fill all lanes are distributed evenly over the epoch.
"""

from dataclasses import dataclass
from math import ceil

import numpy as np

from hpctrain.core.checks import Number, checked
from hpctrain.core.errors import DataError
from hpctrain.core.units import KIB
from hpctrain.data.order.feistel import Feistel, Words, key_of, splitmix64_
from hpctrain.data.order.order import as_indices, as_words, check_order, global_order
from hpctrain.data.samples import Indices

BLOCK_BYTES = 64 * KIB  # a read of this size from a disk costs little more than a smaller one
LANES = 1024  # approximate default maximum, so that every rank of a usual job has its own lanes
MIXED_PER_SAMPLE, MIXED = 32, 8192
"""Default number of blocks in the windows of all lanes: 32 per sample of a global batch, and at
least 8192. If the data are sorted by class, the classes are then mixed in the batches as evenly as
by a full permutation, within one percent."""

# Words in the keys of the permutations, so that their keys differ, also from other orders.
_KEY, _TURN, _INSIDE, _REST = 1, 2, 3, 4


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowShape:
    """Block size, window and lanes of a window order, which mixes ``lanes * window`` blocks."""

    block: int  # neighbouring samples that are read together
    window: int
    """Number of blocks of a lane that are mixed at a time. If the number of blocks of a lane is
    not a multiple of ``window``, the windows are slightly larger."""
    lanes: int  # parts of the data that are read concurrently

    def __post_init__(self) -> None:
        for name in ("block", "window", "lanes"):
            checked(f"{name} of a window order", getattr(self, name), Number, DataError)

    @classmethod
    def of(cls, global_batch: int, sample_bytes: float, block_size: int) -> "WindowShape":
        """Choose a shape that mixes well, for blocks of ``block_size`` samples.

        The order keeps ``32 * max(global_batch, 256)`` blocks in memory, on all nodes together.
        With blocks of 64 KiB, these are 512 MiB for a global batch of 256, and 8 GiB for 4096.
        """
        lanes = global_batch // ceil(global_batch / LANES)
        mixed = max(MIXED_PER_SAMPLE * global_batch, MIXED)
        unit_bytes = max(1.0, sample_bytes * block_size)
        return cls(
            block=block_size * ceil(BLOCK_BYTES / unit_bytes),
            window=ceil(mixed / lanes),
            lanes=lanes,
        )

    @property
    def num_samples(self) -> int:
        """Number of samples in one window of all lanes."""
        return self.block * self.window * self.lanes


class WindowOrder:
    """Order that mixes samples within moving windows of blocks, so that reads are sequential.

    A fixed permutation assigns every block to a slot; slot ``s`` belongs to lane ``s % lanes``.
    The permutation is the same in every epoch, so a node reads the same part of the data and can
    cache it. In each epoch, a second permutation orders the blocks of each lane. This sequence is
    cut into windows, and a third permutation mixes the samples of each window. Samples whose
    blocks do not fill all lanes ("the rest") are distributed evenly over the epoch.

    See ``global_order`` for the arguments. Raises ``DataError``: an argument is out of range.
    """

    def __init__(self, n: int, seed: int, epoch: int, shape: WindowShape) -> None:
        check_order(n, seed, epoch)
        self._n = n
        self.shape = shape
        self._block, self._num_lanes = shape.block, shape.lanes
        self._num_full = n // shape.block
        self._partition = Feistel(max(1, self._num_full), seed, 0, _KEY)
        self._num_turns = self._num_full // shape.lanes
        self._windows = _LaneWindows(self._num_turns, shape.window)
        self._num_rest = n - self._num_turns * shape.lanes * shape.block
        self._stride = n // self._num_rest if self._num_rest else n + 1
        self._inside = Feistel(max(1, self._windows.longest * shape.block), seed, epoch, _INSIDE)
        self._turn = Feistel(max(1, self._num_turns), seed, epoch, _TURN)
        self._inside_key = key_of(seed, epoch, _INSIDE, 0)
        self._turn_key = key_of(seed, epoch, _TURN, 0)
        self._rest = global_order(max(1, self._num_rest), key_of(seed, epoch, _REST), epoch)

    def samples_at(self, positions: Indices) -> Indices:
        """Return the samples at ``positions`` of the epoch, with the same shape."""
        return self._samples_at(positions.ravel()).reshape(positions.shape)

    def lanes_of(self, positions: Indices) -> Indices:
        """Return the lanes of the samples at ``positions``, without computing the samples."""
        rest, rest_numbers, numbers = self._split(positions)
        _, lanes = _divided(numbers, self._num_lanes)
        lanes[rest] = self._rest.samples_at(rest_numbers) // self._block % self._num_lanes
        return lanes

    def _in_slots(self, slots: Indices) -> Indices:
        """Return the blocks in ``slots``; a short last block is in the slot with its own index."""
        full = slots < self._num_full
        blocks = self._partition.forward(as_words(np.where(full, slots, 0)))
        return np.where(full, as_indices(blocks), slots)

    def _samples_at(self, positions: Indices) -> Indices:
        rest, rest_numbers, numbers = self._split(positions)
        if len(rest) == len(positions):
            return self._rest_samples(rest_numbers)
        samples = self._lane_samples(numbers)
        samples[rest] = self._rest_samples(rest_numbers)
        return samples

    def _split(self, positions: Indices) -> tuple[Indices, Indices, Indices]:
        """Separate positions in the rest from positions in lanes.

        Returns three arrays: the indices in ``positions`` of the positions in the rest; for each
        of these, its index within the rest; and for every position, its index among the positions
        in lanes, which has no meaning for a position in the rest.
        """
        before, place = _divided(positions, self._stride)
        is_rest = (place == self._stride - 1) & (before < self._num_rest)
        rest = np.flatnonzero(is_rest)
        numbers = positions - np.minimum(before, self._num_rest)
        last = max(0, self._n - self._num_rest - 1)
        return rest, before[rest], np.minimum(numbers, last, out=numbers)

    def _rest_samples(self, numbers: Indices) -> Indices:
        rest = self._rest.samples_at(numbers)
        slots = self._num_turns * self._num_lanes + rest // self._block
        return self._in_slots(slots) * self._block + rest % self._block

    def _lane_samples(self, numbers: Indices) -> Indices:
        inside, lanes = _divided(numbers, self._num_lanes)
        windows, starts, lengths = self._windows.of(inside // self._block)
        inside -= starts * self._block
        limits = as_words(lengths * self._block) if self._windows.num_longer else None
        tweaks = _tweaks(self._inside_key, windows * self._num_lanes + lanes)
        inside = as_indices(self._inside.forward(as_words(inside), limits, tweaks))
        turns, offsets = _divided(inside, self._block)
        return self._in_slots(self._slots(lanes, turns + starts)) * self._block + offsets

    def _slots(self, lanes: Indices, turns: Indices) -> Indices:
        turned = self._turn.forward(as_words(turns), None, _tweaks(self._turn_key, lanes))
        return as_indices(turned) * self._num_lanes + lanes


class _LaneWindows:
    """Windows of a lane's sequence of blocks; the first windows may be one block longer."""

    def __init__(self, num_turns: int, window: int) -> None:
        self._turns, self.num_longer = divmod(num_turns, max(1, num_turns // window))
        self.longest = self._turns + (self.num_longer > 0)

    def of(self, turns: Indices) -> tuple[Indices, Indices, Indices]:
        """Return, for each block of a lane, the index, start and length of its window.

        ``turns`` are indices of blocks in a lane. Starts and lengths are in blocks.
        """
        longer = turns < self.num_longer * self.longest
        windows = np.where(longer, turns // self.longest, (turns - self.num_longer) // self._turns)
        starts = windows * self._turns + np.minimum(windows, self.num_longer)
        return windows, starts, np.where(longer, self.longest, self._turns)


def _divided(numbers: Indices, size: int) -> tuple[Indices, Indices]:
    """Return quotients and remainders by ``size``, ten times as fast as ``numpy.divmod``."""
    quotients = numbers // size
    return quotients, numbers - quotients * size


def _tweaks(key: int, numbers: Indices) -> Words:
    words = as_words(numbers) + np.uint64(key)
    splitmix64_(words)
    return words
