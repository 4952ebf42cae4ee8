"""Blocks on their way into memory: whoever needs one waits for it, and does not read it again."""

from threading import Event, Lock

import numpy as np

from hpctrain.data.io.values import Array


class Arrivals:
    """Of the blocks of one file. Several threads may use it at once."""

    def __init__(self, num_blocks: int) -> None:
        """Expect nothing yet."""
        self._is_coming = np.zeros(num_blocks, bool)
        self._awaited: dict[int, Event] = {}
        """Set when the block has come."""
        self._lock = Lock()

    def expect(self, blocks: Array) -> None:
        """Promise that ``arrived`` will be called for these blocks, whatever happens."""
        with self._lock:
            self._is_coming[blocks] = True

    def arrived(self, blocks: Array) -> None:
        """Keep the promise: somebody has tried to read these blocks."""
        with self._lock:
            self._is_coming[blocks] = False
            here = [block for block in self._awaited if not self._is_coming[block]]
            events = [self._awaited.pop(block) for block in here]
        for event in events:
            event.set()

    def wait_for(self, blocks: Array) -> None:
        """Return when none of these blocks is on its way."""
        while (coming := blocks[self._is_coming[blocks]]).size:
            # Blocks come in about this order: the last one of them is worth waking up for.
            last = int(coming[-1])
            with self._lock:
                if not self._is_coming[last]:
                    continue
                event = self._awaited.setdefault(last, Event())
            event.wait()
