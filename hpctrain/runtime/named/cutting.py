"""How a batch is cut into messages, remembered for batches that come again."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.runtime.named.batch import Entry
from hpctrain.runtime.named.fusing import runs
from hpctrain.runtime.named.request import Request

_MOST_CUTS = 16


class Message(NamedTuple):
    """Requests that are carried out together."""

    numbers: list[int]
    """Their places in the batch."""
    key: object
    """Equal for equal messages; None where they are not single tensors that share a buffer."""
    is_flat: bool
    """Whether all tensors have one dimension."""


class Cuts:
    """Cuts batches; those that are given by the same ``Entry`` objects only once."""

    def __init__(self) -> None:
        self._known: OrderedDict[object, tuple[Sequence[Entry], list[Message]]] = OrderedDict()
        self._num_cuts = 0

    def of(
        self, requests: Sequence[Request], fusion_bytes: int, entries: Sequence[Entry] | None
    ) -> list[Message]:
        """Return the messages of a batch.

        Args:
            requests: of this rank.
            fusion_bytes: largest message of several requests.
            entries: what was decided of each, where that is worth remembering.
        """
        if entries is None:
            return self._cut(requests, fusion_bytes)
        key = (fusion_bytes, *map(id, entries))
        found = self._known.get(key)
        if found is None:
            # The entries are kept, so that their ids stay theirs.
            found = self._known[key] = entries, self._cut(requests, fusion_bytes)
            if len(self._known) > _MOST_CUTS:
                self._known.popitem(last=False)
        return found[1]

    def _cut(self, requests: Sequence[Request], fusion_bytes: int) -> list[Message]:
        self._num_cuts += 1
        messages = []
        for place, numbers in enumerate(runs(requests, fusion_bytes)):
            together = [requests[number] for number in numbers]
            is_shared = len(numbers) > 1 and all(len(each.tensors) == 1 for each in together)
            is_flat = is_shared and all(len(each.signature.shapes[0]) == 1 for each in together)
            key = (self._num_cuts, place) if is_shared else None
            messages.append(Message(numbers, key, is_flat))
        return messages
