"""Elias omega code, a variable-length code that is short for small positive integers.

Each block of values is a separate stream. ``Reader`` decodes one pair of integers of each stream
per call.

Source: Elias 1975, "Universal codeword sets and representations of the integers".
"""

from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]

LARGEST = 1 << 20  # largest integer that can be encoded
_MOST_BITS = 21  # maximum bits of an integer
_FEW = 1 << 12  # integers whose codes are cached
_WINDOW = 16  # bits per table lookup


def codes_of(numbers: Integers) -> tuple[Integers, Integers]:
    """Return the codes of integers from 1 to ``LARGEST``, and their lengths, up to 32 bits."""
    if not len(numbers) or int(numbers.max()) >= _FEW:
        return _calculated(numbers)
    codes, lengths = _codes_of_few()
    return codes[numbers], lengths[numbers]


@cache
def _codes_of_few() -> tuple[Integers, Integers]:
    return _calculated(np.maximum(np.arange(_FEW), 1))


def _calculated(numbers: Integers) -> tuple[Integers, Integers]:
    codes = np.zeros_like(numbers)  # the final 0 of a code
    lengths = np.ones_like(numbers)
    rest = numbers.copy()
    while (more := rest > 1).any():
        num_bits = np.where(more, np.frexp(rest.astype(np.float64))[1].astype(np.int64), 0)
        codes |= np.where(more, rest, 0) << lengths
        lengths += num_bits
        rest = np.where(more, num_bits - 1, 1)
    return codes, lengths


def packed(codes: Integers, lengths: Integers) -> Bytes:
    """Concatenate codes of up to 33 bits, highest bit first, and return the bytes."""
    ends = np.cumsum(lengths)
    num_bits = int(ends[-1]) if len(ends) else 0
    words = np.zeros(num_bits // 32 + 2, np.uint64)
    if num_bits:
        starts = ends - lengths
        word = starts >> 5
        moved = codes.astype(np.uint64) << (64 - (starts & 31) - lengths).astype(np.uint64)
        first = np.flatnonzero(np.diff(word, prepend=-1))
        both = np.bitwise_or.reduceat(moved, first)  # bits of a word and of the next word
        words[word[first]] = both >> np.uint64(32)
        words[word[first] + 1] |= both & np.uint64(0xFFFFFFFF)
    return words.astype(">u4").view(np.uint8)[: -(-num_bits // 8)]


class Reader:
    """Decodes the gaps and levels of many blocks, one pair of each block per call.

    A gap is the distance between two nonzero values of a block; a level is a quantized value.

    Args:
        data: bytes of all blocks.
        starts: index of the first bit of each block.
    """

    def __init__(self, data: Bytes, starts: Integers) -> None:
        data = np.concatenate([data, np.zeros(16, np.uint8)])
        self._bytes = data.astype(np.int32)
        self._three = self._bytes[:-2] << 16 | self._bytes[1:-1] << 8 | self._bytes[2:]
        self.positions = starts.copy()

    def read(self, num_blocks: int) -> tuple[Integers, Integers]:
        """Return the next gap and signed level of each of the first ``num_blocks`` blocks."""
        positions = self.positions[:num_blocks]
        bits, gaps, levels = _looked_up()
        window = self._three[positions >> 3] >> (8 - (positions & 7)) & 0xFFFF
        used, gap, level = bits[window], gaps[window], levels[window]
        positions += used
        if not used.all():
            long = np.flatnonzero(used == 0)
            gap[long], level[long] = self.gap_at(long), self.level_at(long)
        return gap, level

    def gap_at(self, streams: Integers) -> Integers:
        """Decode the next integer of each block; ``streams`` are the block indices."""
        numbers = np.ones(len(streams), np.int64)
        going = np.arange(len(streams))
        while len(going):
            going = going[self._bit(streams[going]) == 1]
            if not len(going):
                break
            lengths = np.minimum(numbers[going] + 1, 32)  # invalid codes may exceed this
            read = np.zeros(len(going), np.int64)
            for place in range(min(int(lengths.max()), _MOST_BITS)):
                inside = place < lengths
                read = np.where(inside, read << 1 | self._bit(streams[going], place), read)
            self.positions[streams[going]] += lengths
            numbers[going] = read
        self.positions[streams] += 1
        return numbers

    def level_at(self, streams: Integers) -> Integers:
        """Decode the next signed level of each block; ``streams`` are the block indices."""
        signs = 1 - 2 * self._bit(streams)
        self.positions[streams] += 1
        return signs * self.gap_at(streams)

    def _bit(self, streams: Integers, ahead: int = 0) -> Integers:
        at = self.positions[streams] + ahead
        found: Integers = (self._bytes[at >> 3] >> (7 - (at & 7)) & 1).astype(np.int64)
        return found


@cache
def _looked_up() -> tuple[Integers, Integers, Integers]:
    """Decode the first pair of gap and level in each possible window of bits.

    Return lengths, gaps and levels. A length is in bits, and 0 if the pair is longer than the
    window.
    """
    windows = np.zeros((1 << _WINDOW, 16), np.uint8)
    windows[:, :2] = np.arange(1 << _WINDOW, dtype=">u2")[:, None].view(np.uint8)
    starts = np.arange(len(windows)) * 128
    reader = Reader(windows.ravel(), starts)
    every = np.arange(len(windows))
    gaps, levels = reader.gap_at(every), reader.level_at(every)
    used = reader.positions - starts
    return np.where(used <= _WINDOW, used, 0), gaps, levels
