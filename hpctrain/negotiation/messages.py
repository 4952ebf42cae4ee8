"""Messages between the negotiators of neighbouring ranks, as bytes; what the root decides.

The steady state has two messages, both without a pickle: up the tree a vector with a bit for each
operation that is ready below, down the tree the numbers of the operations to carry out.
"""

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpctrain.core.pickles import unpickled
from hpctrain.negotiation.request import Signature

Part = tuple[Signature, list[int] | None]
"""A description of an operation and the ranks that gave it; None for all ranks below."""

BITS, REPORT, SLOTS, VECTOR, DECISION, QUESTIONS = range(6)  # the first byte of a message
_ONE = ord("1")


class Entry(NamedTuple):
    """One named operation that all ranks have announced."""

    name: str
    signature: Signature
    error: str | None = None  # what to raise on every rank instead of carrying it out


@dataclass(slots=True)
class OperationBatch:
    """Operations to carry out now, in this order; the same on every rank."""

    entries: tuple[Entry, ...]
    join_over: int | None = None
    """The rank that joined last, when all have joined: nobody is joined any more."""
    bits: int = field(default=0, compare=False)  # of their numbers, if all have one
    runs: list[list[int]] | None = field(default=None, compare=False)
    """Which of them share a message, once that is known: the same batch comes again."""


class Report(NamedTuple):
    """What a rank tells its parent about itself and the ranks below it."""

    bits: int = 0  # operations with a number that all of them have announced, alike
    names: Sequence[tuple[str, list[Part]]] = ()
    """Other operations that all of them have announced, or have joined."""
    ranks: tuple[int, ...] = ()  # who they are; told once
    joins: Sequence[int] = ()
    """Ranks among them that have joined, in the order in which this became known."""
    all_joined: bool = False  # whether now all of them have
    questions: Sequence[object] = ()
    answers: Sequence[tuple[int, object]] = ()


def pack(kind: int, value: object) -> bytes:
    """Write a ``REPORT``, ``QUESTIONS``, or a ``DECISION`` on any operations."""
    return bytes((kind,)) + pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpack(message: bytes) -> Any:
    """Read what ``pack`` wrote."""
    return unpickled(memoryview(message)[1:])


def pack_bits(bits: int) -> bytes:
    """Write a report of bits alone."""
    return b"\0" + bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def unpack_bits(message: bytes) -> int:
    """Read what ``pack_bits`` wrote."""
    return int.from_bytes(message[1:], "little")


def pack_slots(slots: list[int]) -> bytes:
    """Write a decision on operations with numbers alone; keeps their order."""
    if 16 * len(slots) <= max(slots) or slots != sorted(slots):
        return b"\2" + array("H", slots).tobytes()
    return b"\3" + pack_bits(bits_of(slots))[1:]


def unpack_slots(message: bytes) -> list[int]:
    """Read what ``pack_slots`` wrote."""
    if message[0] == VECTOR:
        return slots_of(unpack_bits(message))
    return array("H", message[1:]).tolist()


def slots_of(bits: int) -> list[int]:
    """Return the numbers of the bits that are set, ascending."""
    return [slot for slot, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"]


def bits_of(slots: Sequence[int]) -> int:
    """Return a number with these bits set."""
    if not slots:
        return 0
    digits = bytearray(b"0") * (max(slots) + 1)
    for slot in slots:
        digits[slot] = _ONE
    return int(digits[::-1], 2)
