"""Elias' omega code: positive integers of any size as bits, small ones shortest.

Many streams are decoded at once, one symbol of each per turn: a stream of its own is what a block
of values has.

Source: Elias 1975, "Universal codeword sets and representations of the integers".
"""

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Integers: TypeAlias = npt.NDArray[np.int64]

_MOST_BITS = 31  # of an integer


def codes_of(numbers: Integers) -> tuple[Integers, Integers]:
    """Return the codes of integers from 1 to 2^31 - 1, and how many bits each has, up to 48."""
    codes = np.zeros_like(numbers)  # the 0 that ends it
    lengths = np.ones_like(numbers)
    rest = numbers.copy()
    while (more := rest > 1).any():
        num_bits = np.where(more, np.frexp(rest.astype(np.float64))[1].astype(np.int64), 0)
        codes |= np.where(more, rest, 0) << lengths
        lengths += num_bits
        rest = np.where(more, num_bits - 1, 1)
    return codes, lengths


def bits_of(codes: Integers, lengths: Integers) -> npt.NDArray[np.uint8]:
    """Return bits, 0 and 1, of codes one behind the other, the highest bit first."""
    ends = np.cumsum(lengths)
    below = np.repeat(ends, lengths) - np.arange(1, ends[-1] + 1 if len(ends) else 1)
    return (np.repeat(codes, lengths) >> below & 1).astype(np.uint8)


class Reader:
    """Reads numbers from many streams of bits, one of each stream per call."""

    def __init__(self, bits: npt.NDArray[np.uint8], starts: Integers) -> None:
        """Take all bits, and where each stream begins."""
        self._bits = np.concatenate([bits, np.zeros(64, np.uint8)])
        self.positions = starts.copy()

    def bit(self, streams: Integers) -> Integers:
        """Return the next bit of these streams."""
        found = self._bits[self.positions[streams]].astype(np.int64)
        self.positions[streams] += 1
        return found

    def number(self, streams: Integers) -> Integers:
        """Return the next number of these streams."""
        numbers = np.ones(len(streams), np.int64)
        going = np.arange(len(streams))
        while len(going):
            going = going[self._bits[self.positions[streams[going]]] == 1]
            if not len(going):
                break
            lengths = numbers[going] + 1
            read = np.zeros(len(going), np.int64)
            at = self.positions[streams[going]]
            for place in range(min(int(lengths.max()), _MOST_BITS)):
                inside = place < lengths
                read = np.where(inside, read << 1 | self._bits[at + place], read)
            self.positions[streams[going]] += lengths
            numbers[going] = read
        self.positions[streams] += 1
        return numbers
