"""Blocks on their way into memory: whoever needs one waits for it, and does not read it again."""

from threading import Condition

import numpy as np

from hpctrain.data.reading.values import Array


class Arrivals:
    """Of the blocks of one file. Several threads may use it at once."""

    def __init__(self, num_blocks: int) -> None:
        """Expect nothing yet."""
        self._is_coming = np.zeros(num_blocks, bool)
        self._changed = Condition()

    def expect(self, blocks: Array) -> None:
        """Promise that ``arrived`` will be called for these blocks, whatever happens."""
        with self._changed:
            self._is_coming[blocks] = True

    def arrived(self, blocks: Array) -> None:
        """Keep the promise: somebody has tried to read these blocks."""
        with self._changed:
            self._is_coming[blocks] = False
            self._changed.notify_all()

    def wait_for(self, blocks: Array) -> None:
        """Return when none of these blocks is on its way."""
        if self._is_coming[blocks].any():
            with self._changed:
                self._changed.wait_for(lambda: not self._is_coming[blocks].any())
