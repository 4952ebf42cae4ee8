"""The crc32 of each block of samples, formed while the samples come in."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.checksum import crc32
from hpctrain.data.format.rows import RaggedRows


class BlockCrcs:
    """Checksums of one field of a shard."""

    def __init__(self, block_size: int) -> None:
        """Start with no samples; ``block_size`` samples share a crc32."""
        self._block_size = block_size
        self._num_samples = 0
        self._crcs: list[int] = []

    def extend(self, rows: NDArray[Any] | RaggedRows) -> None:
        """Add samples."""
        stop = len(rows.offsets) - 1 if isinstance(rows, RaggedRows) else len(rows)
        done = 0
        while done < stop:
            inside = self._num_samples % self._block_size
            if not inside:
                self._crcs.append(0)
            end = min(stop, done + self._block_size - inside)
            if isinstance(rows, RaggedRows):
                piece = rows.values[rows.offsets[done] : rows.offsets[end]]
            else:
                piece = rows[done:end]
            self._crcs[-1] = crc32(np.ascontiguousarray(piece).data, self._crcs[-1])
            self._num_samples += end - done
            done = end

    @property
    def table(self) -> NDArray[np.uint32]:
        """Return ``(num_blocks,)``, as ``/crc/<field>`` has it."""
        return np.array(self._crcs, "<u4")
