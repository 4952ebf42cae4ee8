"""The numbers that all ranks have for the names they use again and again."""

from collections import OrderedDict, deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.negotiation.operation_batch import Entry, OperationBatch
from hpctrain.negotiation.request import Signature

if TYPE_CHECKING:
    from hpctrain.negotiation.handle import Handle
    from hpctrain.negotiation.recurring import Recurring

NUM_SLOTS = 4096
"""Most names that have a number: a vector of as many bits is 512 bytes."""


_ONE = ord("1")
_MOST_BATCHES = 16
"""Batches that are kept, for a program that repeats them."""


class LookUp(NamedTuple):
    """What was looked up before, as long as no number changes."""

    recurring: "list[Recurring | None]"
    numbers: dict[str, int]
    bits: int


class KnownBatch(NamedTuple):
    """A batch of operations that all have a number."""

    batch: OperationBatch
    bits: int


class Drop(NamedTuple):
    """An operation that has lost its number."""

    slot: int
    entry: Entry


class ResponseCache:
    """A cache of operations; the least recently decided one leaves when it is full.

    It changes by decisions alone, so after the same decisions it is the same on every rank. What
    a child sent before it knew of a decision is read by the record of what was dropped since.
    """

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        """Start empty.

        Args:
            num_slots: the same on all ranks; at most 65536.
        """
        self.numbers: OrderedDict[str, int] = OrderedDict()
        """By name, the least recently decided one first."""
        self.entries: dict[int, Entry] = {}
        """By number."""
        self.num_drops = 0
        """Operations that have lost their number so far: the version that a message speaks of."""
        self._free = list(range(num_slots - 1, -1, -1))
        self._record: deque[Drop] = deque()
        self._looked_up = LookUp([], {}, 0)
        self._batches: OrderedDict[bytes, KnownBatch] = OrderedDict()
        self._touched: Sequence[Entry] = ()

    def touch(self, entries: Sequence[Entry]) -> None:
        """Note that these have been decided, in this order."""
        if entries is self._touched:  # nothing came after them
            return
        move_to_end = self.numbers.move_to_end
        for entry in entries:
            move_to_end(entry.name)
        self._touched = entries

    def batch(self, decision: bytes, slots: Sequence[int]) -> KnownBatch:
        """Return the operations of these numbers, which a message said: the same object again."""
        known = self._batches.get(decision)
        if known is None:
            batch = OperationBatch(tuple([self.entries[slot] for slot in slots]), None)
            known = self._batches[decision] = KnownBatch(batch, bits_of(slots))
            if len(self._batches) > _MOST_BATCHES:
                self._batches.popitem(last=False)
        else:
            self._batches.move_to_end(decision)
        return known

    def look_up(
        self, handles: "Sequence[Handle]", found: dict[str, int]
    ) -> "tuple[int, list[Handle]]":
        """Put the numbers of those that have one into ``found``; return their bits, and the rest.

        An operation that is not what its number says has none.
        """
        recurring = [handle.recurring for handle in handles]
        if recurring == self._looked_up.recurring:
            found.update(self._looked_up.numbers)
            return self._looked_up.bits, []
        numbers, entries = self.numbers, self.entries
        others, slots, fresh = [], [], {}
        for handle in handles:
            slot = numbers.get(handle.name)
            same = handle.recurring or handle.request
            if slot is None or entries[slot].signature != same.signature:
                others.append(handle)
            else:
                fresh[handle.name] = slot
                slots.append(slot)
        found.update(fresh)
        bits = bits_of(slots)
        if not (others or None in recurring):
            self._looked_up = LookUp(recurring, fresh, bits)
        return bits, others

    def put(self, name: str, signature: Signature) -> Drop | None:
        """Give ``name`` a number, or its number another meaning; return who had to leave."""
        slot, left = self.numbers.pop(name, None), None
        if slot is None:
            if not self._free:
                left = self.drop(next(iter(self.numbers)))
            slot = self._free.pop()
        self._forget_batches()
        self.numbers[name] = slot
        self.entries[slot] = Entry(name, signature, None, False)  # noqa: FBT003
        return left

    def drop(self, name: str) -> Drop | None:
        """Take away the number of ``name``, if it has one."""
        slot = self.numbers.pop(name, None)
        if slot is None:
            return None
        self._forget_batches()
        left = Drop(slot, self.entries.pop(slot))
        self._free.append(slot)
        self._record.append(left)
        self.num_drops += 1
        return left

    def translate(self, bits: int, num_drops: int) -> tuple[int, list[Entry]]:
        """Read a vector of a rank that knew of the first ``num_drops`` drops only.

        Returns:
            The bits that still mean the same, and the operations that have no number any more.
        """
        gone: list[Entry] = []
        for back in range(self.num_drops - num_drops, 0, -1):
            slot, entry = self._record[-back]
            if bits >> slot & 1:
                bits ^= 1 << slot
                gone.append(entry)
        return bits, gone

    def forget(self, num_drops: int) -> None:
        """Keep no record of the first ``num_drops`` drops: everybody knows of them."""
        while len(self._record) > self.num_drops - num_drops:
            self._record.popleft()

    def _forget_batches(self) -> None:
        """Keep nothing that follows from the numbers: they change."""
        self._looked_up = LookUp([], {}, 0)
        self._batches.clear()
        self._touched = ()


def slots_of(bits: int) -> list[int]:
    """Return the numbers of the bits that are set, ascending."""
    if bits.bit_count() > 8:
        return [slot for slot, bit in enumerate(bin(bits)[:1:-1]) if bit == "1"]
    slots = []
    while bits:
        slots.append((bits & -bits).bit_length() - 1)
        bits &= bits - 1
    return slots


def bits_of(slots: Sequence[int]) -> int:
    """Return a number with these bits set."""
    if not slots:
        return 0
    digits = bytearray(b"0") * (max(slots) + 1)
    for slot in slots:
        digits[slot] = _ONE
    return int(digits[::-1], 2)
