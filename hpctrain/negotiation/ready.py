"""What the root of the tree may decide."""

from collections.abc import Iterable, Mapping

from hpctrain.negotiation.disagreement import disagreement, missing_root
from hpctrain.negotiation.messages import Decision, KnownEntry, NewEntry, Part
from hpctrain.negotiation.response_cache import Slots


class Ready:
    """Operations that every rank has announced or, having joined, goes without."""

    def __init__(self, num_ranks: int, slots: Slots) -> None:
        """Start empty."""
        self._num_ranks = num_ranks
        self._slots = slots
        self._bits = 0
        self._names: dict[str, list[Part]] = {}

    def add(self, bits: int, names: Iterable[tuple[str, list[Part]]]) -> None:
        """Take what ``Tally.take`` returns."""
        self._bits |= bits
        self._names.update(names)

    def __len__(self) -> int:
        return self._bits.bit_count() + len(self._names)

    def take(
        self, announced: Mapping[str, int], join_over: int | None
    ) -> list[int] | Decision | None:
        """Return everything as one decision; None if there is nothing to decide.

        Args:
            announced: what the root has announced, with the number or -1, in its order, which is
                the order of the decision.
            join_over: the rank that joined last, if all have joined.

        Returns:
            Numbers, if all operations have one and all ranks take part in them.
        """
        bits, names = self._bits, self._names
        if not (bits or names or join_over is not None):
            return None
        self._bits, self._names = 0, {}
        if not names and join_over is None:
            if bits.bit_count() == len(announced):  # all of it, as a rule
                return list(announced.values())
            return [slot for slot in announced.values() if slot >= 0 and bits >> slot & 1]
        items: list[NewEntry | KnownEntry] = []
        for name, slot in announced.items():
            if name in names:
                items.append(self._item(name, names.pop(name)))
            elif slot >= 0 and bits >> slot & 1:
                items.append(KnownEntry(slot, joined=False))
        items += [self._item(name, parts) for name, parts in names.items()]
        return Decision(tuple(items), join_over)

    def _item(self, name: str, parts: list[Part]) -> NewEntry | KnownEntry:
        signature, everywhere = parts[0]
        error, joined = None, False
        if everywhere is not None:
            given = [(some, ranks or []) for some, ranks in parts]
            joined = sum(len(ranks) for _, ranks in given) < self._num_ranks
            if len(given) > 1:
                error = disagreement(name, given)
            else:
                error = missing_root(name, signature, everywhere)
        slot = self._slots.numbers.get(name)
        if error or slot is None or self._slots.entries[slot].signature != signature:
            return NewEntry(name, signature, error, joined)
        return KnownEntry(slot, joined)
