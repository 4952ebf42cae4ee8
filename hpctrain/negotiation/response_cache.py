"""Response cache: the numbers that all ranks have for the operations they use again and again."""

from collections.abc import Sequence

from hpctrain.negotiation.messages import Entry, OperationBatch
from hpctrain.negotiation.request import Signature

NUM_SLOTS = 16384
"""Most names that have a number: a vector of as many bits is 2 KiB."""
_MOST_BATCHES = 16
"""Batches that are kept, for a program that repeats them."""


class ResponseCache:
    """Keeps the first operations of so many names; a later name has no number.

    It changes by decisions alone, so after the same decisions it is the same on every rank. A
    number never goes to another name, and gets another signature only when all ranks have
    announced that: whatever is under way means what its sender meant.
    """

    def __init__(self, num_slots: int = NUM_SLOTS) -> None:
        """Start empty.

        Args:
            num_slots: the same on all ranks; at most 65536.
        """
        self.numbers: dict[str, int] = {}
        """By name."""
        self.entries: list[Entry] = []
        """By number."""
        self._num_slots = num_slots
        self._batches: dict[bytes, OperationBatch] = {}

    def number(self, name: str, signature: Signature) -> int | None:
        """Return the number of an operation; None if it has none, or is not what that says."""
        slot = self.numbers.get(name)
        return slot if slot is not None and self.entries[slot].signature == signature else None

    def put(self, name: str, signature: Signature) -> None:
        """Give an operation a number, or its number another meaning."""
        self._batches.clear()
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
            batch = OperationBatch(tuple([self.entries[slot] for slot in slots]))
            self._batches[decision] = batch
        return batch
