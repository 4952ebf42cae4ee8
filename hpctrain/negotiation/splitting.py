"""How a batch is cut into messages, remembered for batches that come again."""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from hpctrain.negotiation.batch import Entry
from hpctrain.negotiation.fusing import runs
from hpctrain.negotiation.handle import Handle
from hpctrain.negotiation.request import Request

_MOST_CUTS = 16


class Message(NamedTuple):
    """Requests that are carried out together."""

    pick: Callable[[Any], Sequence[Handle]]
    """Takes theirs out of the handles of the batch."""
    key: object
    """Equal for equal messages; None where they are not single tensors that share a buffer."""
    is_flat: bool
    """Whether all tensors have one dimension."""


class Cuts:
    """Cuts batches; those that are given by the same entries only once."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, tuple[Sequence[Entry], list[Message]]] = OrderedDict()
        self._num_cuts = 0

    def of(
        self, handles: Sequence[Handle], fusion_bytes: int, entries: Sequence[Entry] | None
    ) -> list[Message]:
        """Return the messages of a batch.

        Args:
            handles: of this rank.
            fusion_bytes: largest message of several requests.
            entries: what was decided of each, where that is worth remembering.
        """
        if entries is None:
            return self._cut(handles, fusion_bytes)
        key = fusion_bytes, id(entries)
        found = self._known.get(key)
        if found is None:
            # The entries are kept, so that their id stays theirs.
            found = self._known[key] = entries, self._cut(handles, fusion_bytes)
            if len(self._known) > _MOST_CUTS:
                self._known.popitem(last=False)
        return found[1]

    def _cut(self, handles: Sequence[Handle], fusion_bytes: int) -> list[Message]:
        self._num_cuts += 1
        requests = [handle.request for handle in handles]
        return [
            _message(numbers, [requests[number] for number in numbers], (self._num_cuts, place))
            for place, numbers in enumerate(runs(requests, fusion_bytes))
        ]


def _message(numbers: list[int], together: Sequence[Request], key: object) -> Message:
    if len(numbers) == 1 or any(len(each.tensors) != 1 for each in together):
        return Message(
            pick=lambda handles: [handles[number] for number in numbers], key=None, is_flat=False
        )
    is_flat = all(len(each.signature.shapes[0]) == 1 for each in together)
    return Message(itemgetter(*numbers), key, is_flat)
