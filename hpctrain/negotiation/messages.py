"""Encoding of the control messages between negotiators, including decisions of the root.

Repeated operations need two kinds of message, both without pickle: up the tree, a bit vector of
operations that are ready below; down the tree, the numbers of the operations to execute.
"""

import pickle
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hpctrain.core.pickles import unpickled
from hpctrain.negotiation.request import Signature

Part = tuple[Signature, list[int] | None]
"""Signature of an operation, and ranks that announced it; None for all ranks of the subtree."""

BITS, REPORT, SLOTS, VECTOR, DECISION, QUESTIONS = range(6)  # the first byte of a message
_ONE = ord("1")


class Entry(NamedTuple):
    """A named operation that all ranks have announced."""

    name: str
    signature: Signature
    error: str | None = None  # error message to raise on every rank


@dataclass(slots=True)
class OperationBatch:
    """Operations to execute now, in this order; the same on every rank."""

    entries: tuple[Entry, ...]
    join_over: int | None = None
    """The rank that joined last, if all ranks have joined: the joins are then complete."""
    bits: int = field(default=0, compare=False)  # numbers of the entries, as bits; 0 if not stored
    runs: list[list[int]] | None = field(default=None, compare=False)
    """Groups of entries that share a message, as indices; cached, since batches repeat."""


class Report(NamedTuple):
    """Report of a rank to its parent, about this rank and the ranks below it."""

    bits: int = 0  # numbered operations that all of these ranks have announced
    names: Sequence[tuple[str, list[Part]]] = ()
    """Other operations that all of these ranks have announced, except ranks that have joined."""
    ranks: tuple[int, ...] = ()  # this rank and the ranks below it; sent once
    joins: Sequence[int] = ()
    """Ranks that have joined, in the order of arrival."""
    all_joined: bool = False  # whether all of these ranks have joined
    questions: Sequence[Any] = ()
    answers: Sequence[object] = ()


def pack(kind: int, value: object) -> bytes:
    """Encode a message of kind ``REPORT``, ``QUESTIONS`` or ``DECISION``."""
    return bytes((kind,)) + pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def unpack(message: bytes) -> Any:
    """Decode a message that ``pack`` has encoded."""
    return unpickled(memoryview(message)[1:])


def pack_bits(bits: int) -> bytes:
    """Encode a report that consists of bits only."""
    return b"\0" + bits.to_bytes((bits.bit_length() + 7) // 8, "little")


def unpack_bits(message: bytes) -> int:
    """Decode a message that ``pack_bits`` has encoded."""
    return int.from_bytes(message[1:], "little")


def pack_slots(slots: list[int]) -> bytes:
    """Encode the decision to execute the operations with the numbers ``slots``, in this order."""
    if 16 * len(slots) <= max(slots) or slots != sorted(slots):
        return b"\2" + array("H", slots).tobytes()
    return b"\3" + pack_bits(bits_of(slots))[1:]


def unpack_slots(message: bytes) -> list[int]:
    """Decode a message that ``pack_slots`` has encoded."""
    if message[0] == VECTOR:
        return slots_of(unpack_bits(message))
    return array("H", message[1:]).tolist()


def slots_of(bits: int) -> list[int]:
    """Return the indices of the bits that are set, ascending."""
    return [slot for slot, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"]


def bits_of(slots: Sequence[int]) -> int:
    """Return an integer in which the bits ``slots`` are set."""
    if not slots:
        return 0
    digits = bytearray(b"0") * (max(slots) + 1)
    for slot in slots:
        digits[slot] = _ONE
    return int(digits[::-1], 2)
