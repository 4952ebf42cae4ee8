"""Messages between the negotiators of neighbouring ranks, as bytes.

The steady state has two messages, both without a pickle: up the tree a vector with a bit for each
operation that is ready below, down the tree the numbers of the operations to carry out.
"""

import pickle
from array import array
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from hpctrain.negotiation.reduce_op import ReduceOp
from hpctrain.negotiation.request import Kind, Signature
from hpctrain.negotiation.response_cache import slots_of

Part = tuple[Signature, list[int] | None]
"""A description of an operation and the ranks that gave it; None for all ranks below."""

BITS, REPORT, SLOTS, VECTOR, DECISION, QUESTIONS = range(6)
"""The first byte of a message."""
_NUM_DROPS_BYTES = 8
_START = 1 + _NUM_DROPS_BYTES


class Report(NamedTuple):
    """What a rank tells its parent about itself and the ranks below it."""

    num_drops: int = 0
    """Which version of the slots it speaks of."""
    bits: int = 0
    """Operations with a number that all of them have announced, alike."""
    names: tuple[tuple[str, list[Part]], ...] = ()
    """Other operations that all of them have announced, or have joined."""
    ranks: tuple[int, ...] = ()
    """Who they are; told once."""
    joins: tuple[int, ...] = ()
    """Ranks among them that have joined, in the order in which this became known."""
    all_joined: bool = False
    """Whether now all of them have."""
    questions: tuple[object, ...] = ()
    answers: tuple[tuple[int, object], ...] = ()


class NewEntry(NamedTuple):
    """An operation that gets a number, or an error."""

    name: str
    signature: Signature
    error: str | None
    joined: bool


class KnownEntry(NamedTuple):
    """An operation that has a number."""

    slot: int
    joined: bool


class Decision(NamedTuple):
    """What the root has decided."""

    items: tuple[NewEntry | KnownEntry, ...]
    join_over: int | None


def pack_report(report: Report) -> bytes:
    """Write a report of anything."""
    names = [(name, [(_code(signature), ranks) for signature, ranks in parts])
             for name, parts in report.names]  # fmt: skip
    return _pickled(REPORT, (*report[:2], names, *report[3:]))


def pack_bits(num_drops: int, bits: int) -> bytes:
    """Write a report of bits alone."""
    vector = bits.to_bytes((bits.bit_length() + 7) // 8, "little")
    return b"\0" + num_drops.to_bytes(_NUM_DROPS_BYTES, "little") + vector


def unpack_bits(message: bytes) -> tuple[int, int]:
    """Read what ``pack_bits`` wrote."""
    return int.from_bytes(message[1:_START], "little"), int.from_bytes(message[_START:], "little")


def unpack_report(message: bytes) -> Report:
    """Read what ``pack_report`` wrote, other than bits alone."""
    num_drops, bits, coded, *rest = _unpickled(message)
    names = tuple(
        (name, [(_signature(code), ranks) for code, ranks in parts]) for name, parts in coded
    )
    return Report(num_drops, bits, names, *rest)


def pack_slots(slots: list[int]) -> bytes:
    """Write a decision on operations with numbers alone; keeps their order."""
    highest = max(slots)
    if 16 * len(slots) <= highest or slots != sorted(slots):
        return b"\2" + array("H", slots).tobytes()
    bits = bytearray(highest // 8 + 1)
    for slot in slots:
        bits[slot >> 3] |= 1 << (slot & 7)
    return b"\3" + bits


def unpack_slots(message: bytes) -> list[int]:
    """Read what ``pack_slots`` wrote."""
    if message[0] == VECTOR:
        return slots_of(int.from_bytes(message[1:], "little"))
    return array("H", message[1:]).tolist()


def pack_decision(decision: Decision) -> bytes:
    """Write any decision."""
    items = [
        tuple(item)
        if isinstance(item, KnownEntry)
        else (item.name, _code(item.signature), item.error, item.joined)
        for item in decision.items
    ]
    return _pickled(DECISION, (items, decision.join_over))


def unpack_decision(message: bytes) -> Decision:
    """Read what ``pack_decision`` wrote."""
    items, join_over = _unpickled(message)
    return Decision(
        tuple(
            KnownEntry(*item)
            if len(item) == len(KnownEntry._fields)
            else NewEntry(item[0], _signature(item[1]), item[2], item[3])
            for item in items
        ),
        join_over,
    )


def pack_questions(questions: list[object]) -> bytes:
    """Write questions for everybody."""
    return _pickled(QUESTIONS, questions)


def unpack_questions(message: bytes) -> list[object]:
    """Read what ``pack_questions`` wrote."""
    questions: list[object] = _unpickled(message)
    return questions


_Code = tuple[Any, ...]
"""A signature of strings and numbers alone, which is a tenth of the time to pickle."""


@lru_cache(maxsize=4096)
def _code(signature: Signature) -> _Code:
    kind, dtypes, shapes, op, *rest = signature
    return (
        kind.value,
        tuple([str(dtype).removeprefix("torch.") for dtype in dtypes]),
        tuple([tuple(shape) for shape in shapes]),
        op and op.value,
        *rest,
    )


@lru_cache(maxsize=4096)
def _signature(code: _Code) -> Signature:
    kind, dtypes, shapes, op, *rest = code
    return Signature(
        Kind(kind),
        tuple([getattr(torch, dtype) for dtype in dtypes]),
        shapes,
        op and ReduceOp(op),
        *rest,
    )


def _pickled(kind: int, value: object) -> bytes:
    return bytes((kind,)) + pickle.dumps(value, pickle.HIGHEST_PROTOCOL)


def _unpickled(message: bytes) -> Any:
    return pickle.loads(memoryview(message)[1:])  # noqa: S301 - from a rank of this program
