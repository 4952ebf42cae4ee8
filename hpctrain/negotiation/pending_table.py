"""Table of the operations that this rank and the ranks below it in the tree have announced."""

from collections.abc import Sequence
from typing import NamedTuple, cast

from hpctrain.negotiation.messages import Entry, OperationBatch, Part, bits_of, slots_of
from hpctrain.negotiation.request import Repeated, Signature

NUM_SLOTS = 16384  # maximum number of numbered names; a bit vector of them has 2 KiB
_MAX_BATCHES = 16  # cached batches


class Numbers(NamedTuple):
    """Numbers of several operations, by name and as a bit vector."""

    slots: dict[str, int]  # by name
    bits: int


class ResponseCache:
    """Assigns numbers to the names of operations.

    Only decisions change the cache, so the cache is the same on every rank after the same
    decisions. The name of a number never changes. The signature of a number changes only after
    all ranks have announced the new signature, so receivers interpret a message in flight as its
    sender does.

    Args:
        num_slots: maximum number of names, at most 65536, the same on all ranks; later names get
            no number.
    """

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        self.numbers: dict[str, int] = {}  # by name
        self.entries: list[Entry] = []  # by number
        self._num_slots = num_slots
        self._batches: dict[bytes, OperationBatch] = {}
        self._last: tuple[Sequence[object], Numbers] | None = None

    def number(self, name: str, signature: Signature) -> int | None:
        """Return the number of an operation; None if the name has no number for this signature."""
        slot = self.numbers.get(name)
        if slot is None:
            return None
        known = self.entries[slot].signature
        return slot if known is signature or known == signature else None

    def numbers_of(self, repeated: Sequence[Repeated | None]) -> Numbers | None:
        """Return the numbers of all operations; None unless all have numbers.

        The last result is cached.
        """
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
        """Assign a number to a name; if the name has a number, replace the number's signature."""
        self._batches.clear()
        self._last = None
        slot = self.numbers.get(name)
        if slot is not None:
            self.entries[slot] = Entry(name, signature)
        elif len(self.entries) < self._num_slots:
            self.numbers[name] = len(self.entries)
            self.entries.append(Entry(name, signature))

    def batch(self, decision: bytes, slots: Sequence[int]) -> OperationBatch:
        """Return the batch of a decision; a repeated decision returns the same object."""
        batch = self._batches.get(decision)
        if batch is None:
            if len(self._batches) >= _MAX_BATCHES:
                self._batches.clear()
            entries = tuple([self.entries[slot] for slot in slots])
            batch = OperationBatch(entries, bits=bits_of(slots))
            self._batches[decision] = batch
        return batch


OWN = 0  # the source that is this rank; its children are sources 1, 2, ...


class PendingTable:
    """Counts announcements by source; a source is this rank or the subtree of a child.

    If an operation has a number and the signature that is stored for this number, its announcement
    is a bit. Other operations are stored by name, with the ranks of each signature. ``take()``
    returns each operation once, as soon as every source has announced the operation or has joined.

    Args:
        rank: this rank.
        num_children: number of children in the tree.
        slots: numbers of the operations; the owner of this table updates them.
    """

    def __init__(self, rank: int, num_children: int, slots: ResponseCache) -> None:
        self.bits = [0] * (1 + num_children)
        """For each source, the numbers of its announced but undecided operations, as bits."""
        self.joined = [False] * (1 + num_children)  # by source, whether all its ranks have joined
        self.ranks: list[Sequence[int]] = [(rank,), *((),) * num_children]
        """Ranks of each source; set before the first operation of the source is complete."""
        self._slots = slots
        self._parts: dict[str, dict[int, list[Part]]] = {}
        self._taken_bits = 0
        self._taken_names: set[str] = set()
        self._touched: dict[str, None] = {}

    def add_bits(self, source: int, bits: int) -> None:
        """Record that ``source`` has announced the numbered operations ``bits``."""
        self.bits[source] |= bits
        for name in self._parts:
            slot = self._slots.numbers.get(name)
            if slot is not None and bits >> slot & 1:
                self._touched[name] = None

    def add_name(self, source: int, name: str, parts: list[Part]) -> None:
        """Record that ``source`` has announced an operation that has no number.

        An operation counts as having no number if its signature differs from the signature that is
        stored for its number.
        """
        self._parts.setdefault(name, {})[source] = parts
        self._touched[name] = None

    def join(self, source: int) -> None:
        """Treat every operation as announced by ``source`` from now on."""
        self.joined[source] = True
        self._touched.update(dict.fromkeys(self._parts))

    def unjoin(self) -> None:
        """Treat no source as joined any longer."""
        self.joined = [False] * len(self.joined)

    def take(self) -> tuple[int, list[tuple[str, list[Part]]]]:
        """Return the operations that became complete since the last call, as bits and by name.

        Bits are operations that every rank of the subtree has announced with the same signature.
        In the list by name, None as ranks means all ranks of the subtree.
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
        """Remove the decided operations in ``bits`` and in ``names``."""
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
        """Return the announcements of ``name`` by all sources; None if a source is missing."""
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
        are_equal = all(ranks is None and signature == first for _, (signature, ranks) in found)
        if are_equal and not lacking:
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
