"""Operations that this rank and all ranks below it have announced."""

from collections.abc import Sequence
from typing import NamedTuple, cast

from hpctrain.negotiation.messages import Entry, OperationBatch, Part, bits_of, slots_of
from hpctrain.negotiation.request import Repeated, Signature

NUM_SLOTS = 16384  # most names that have a number: a vector of as many bits is 2 KiB
_MOST_BATCHES = 16  # batches that are kept, for a program that repeats them


class Numbers(NamedTuple):
    """Those of some operations."""

    slots: dict[str, int]  # by name
    bits: int


class ResponseCache:
    """Keeps the first operations of so many names; a later name has no number.

    It changes by decisions alone, so after the same decisions it is the same on every rank. A
    number never goes to another name, and gets another signature only when all ranks have
    announced that: whatever is under way means what its sender meant.
    """

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        """Start empty; ``num_slots``, at most 65536, is the same on all ranks."""
        self.numbers: dict[str, int] = {}  # by name
        self.entries: list[Entry] = []  # by number
        self._num_slots = num_slots
        self._batches: dict[bytes, OperationBatch] = {}
        self._last: tuple[Sequence[object], Numbers] | None = None

    def number(self, name: str, signature: Signature) -> int | None:
        """Return the number of an operation; None if it has none, or is not what that says."""
        slot = self.numbers.get(name)
        if slot is None:
            return None
        known = self.entries[slot].signature
        return slot if known is signature or known == signature else None

    def numbers_of(self, repeated: Sequence[Repeated | None]) -> Numbers | None:
        """Return the numbers of operations; None if not all have one. The last are remembered."""
        if self._last is not None and self._last[0] == repeated:
            return self._last[1]
        slots = {each.name: self.number(each.name, each.signature) for each in repeated if each}
        if len(slots) < len(repeated) or None in slots.values():
            return None
        numbers = cast("dict[str, int]", slots)
        found = Numbers(numbers, bits_of(list(numbers.values())))
        self._last = repeated, found
        return found

    def put(self, name: str, signature: Signature) -> None:
        """Give an operation a number, or its number another meaning."""
        self._batches.clear()
        self._last = None
        slot = self.numbers.get(name)
        if slot is not None:
            self.entries[slot] = Entry(name, signature)
        elif len(self.entries) < self._num_slots:
            self.numbers[name] = len(self.entries)
            self.entries.append(Entry(name, signature))

    def batch(self, decision: bytes, slots: Sequence[int]) -> OperationBatch:
        """Return the operations of these numbers, which a message said: the same object again."""
        batch = self._batches.get(decision)
        if batch is None:
            if len(self._batches) >= _MOST_BATCHES:
                self._batches.clear()
            entries = tuple([self.entries[slot] for slot in slots])
            batch = OperationBatch(entries, bits=bits_of(slots))
            self._batches[decision] = batch
        return batch


OWN = 0  # the source that is this rank; its children are sources 1, 2, ...


class PendingTable:
    """Counts by source: the announcements of this rank, and of each child's whole subtree.

    Operations that have a number, and are announced as all know them, are bits; the others are
    kept by name, with the ranks of each description. ``take()`` returns each operation once, as
    soon as every source has announced it or has joined.
    """

    def __init__(self, rank: int, num_children: int, slots: ResponseCache) -> None:
        """Take the numbers, which somebody else keeps up to date."""
        self.bits = [0] * (1 + num_children)
        """By source, the operations it has announced that are not decided."""
        self.joined = [False] * (1 + num_children)  # by source, whether all its ranks have joined
        self.ranks: list[Sequence[int]] = [(rank,), *((),) * num_children]
        """By source, its ranks; known before its first operation is complete."""
        self._slots = slots
        self._parts: dict[str, dict[int, list[Part]]] = {}
        self._taken_bits = 0
        self._taken_names: set[str] = set()
        self._touched: dict[str, None] = {}

    def add_bits(self, source: int, bits: int) -> None:
        """Count operations that have a number."""
        self.bits[source] |= bits
        if self._parts:
            for name in self._parts:
                slot = self._slots.numbers.get(name)
                if slot is not None and bits >> slot & 1:
                    self._touched[name] = None

    def add_name(self, source: int, name: str, parts: list[Part]) -> None:
        """Count an operation that is new, or another than its number says."""
        self._parts.setdefault(name, {})[source] = parts
        self._touched[name] = None

    def join(self, source: int) -> None:
        """Count the source for everything from now on."""
        self.joined[source] = True
        self._touched.update(dict.fromkeys(self._parts))

    def unjoin(self) -> None:
        """Let all sources announce again."""
        self.joined = [False] * len(self.joined)

    def take(self) -> tuple[int, list[tuple[str, list[Part]]]]:
        """Return what is complete since the last call: as bits, and by name.

        Bits are operations that every rank here has announced, alike. A part without ranks means
        all of them too.
        """
        every = some = self.bits[OWN]
        for bits in self.bits[1:]:
            every &= bits
            some |= bits
        fresh = every & ~self._taken_bits
        self._taken_bits |= fresh
        if some != every and True in self.joined:
            entries = self._slots.entries
            self._touched.update(
                dict.fromkeys(entries[slot].name for slot in slots_of(some & ~every))
            )
        return fresh, self._take_names() if self._touched else []

    def clear(self, bits: int, names: Sequence[str]) -> None:
        """Forget what has been decided: all operations of ``bits``, and those of ``names``."""
        keep = ~bits
        self.bits = [others & keep for others in self.bits]
        self._taken_bits &= keep
        for name in names:
            self._parts.pop(name, None)
            self._touched.pop(name, None)
            self._taken_names.discard(name)

    def _take_names(self) -> list[tuple[str, list[Part]]]:
        touched, self._touched = self._touched, {}
        taken = []
        for name in touched:
            if name not in self._taken_names:
                parts = self._complete(name)
                if parts is not None:
                    self._taken_names.add(name)
                    taken.append((name, parts))
        return taken

    def _complete(self, name: str) -> list[Part] | None:
        """Return what the sources have announced for ``name``; None if one of them is missing."""
        slot = self._slots.numbers.get(name)
        known = None if slot is None else self._slots.entries[slot]
        by_source = self._parts.get(name, {})
        found: list[tuple[int, Part]] = []
        lacking = False
        for source, bits in enumerate(self.bits):
            if source in by_source:
                found += [(source, part) for part in by_source[source]]
            elif known is not None and slot is not None and bits >> slot & 1:
                found.append((source, (known.signature, None)))
            elif self.joined[source]:
                lacking = True
            else:
                return None
        first = found[0][1][0]
        alike = all(ranks is None and signature == first for _, (signature, ranks) in found)
        if alike and not lacking:
            return [(first, None)]
        return self._by_description(found)

    def _by_description(self, found: list[tuple[int, Part]]) -> list[Part]:
        merged: dict[object, tuple[Part, list[int]]] = {}
        for source, part in found:
            signature, given = part
            _, ranks = merged.setdefault(signature, (part, []))
            ranks += self.ranks[source] if given is None else given
        parts: list[Part] = [(part[0], sorted(ranks)) for part, ranks in merged.values()]
        return sorted(parts, key=lambda part: part[1] or [])
