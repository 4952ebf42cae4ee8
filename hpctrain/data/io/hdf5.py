"""Values that only HDF5 finds or decodes, and where their chunks lie in the file."""

import os
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain.data.io.chunks import chunk_rows_for
from hpctrain.data.io.values import Array


def open_hdf5(path: Path) -> h5py.File:
    """Open a file for reading whatever locks it has; HDF5 keeps no values of it in memory.

    Raises:
        OSError: it is missing, or not HDF5.
    """
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_file_locking(False, ignore_when_disabled=False)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    # Chunks are kept by us, and what is read again must come from the file.
    access.set_sieve_buf_size(0)
    access.set_cache(0, 0, 0, 0.0)
    return h5py.File(h5py.h5f.open(os.fsencode(path), h5py.h5f.ACC_RDONLY, access))


class HDF5Values:
    """A dataset, filtered or of any other kind that has no plain bytes in the file."""

    def __init__(self, dataset: Any) -> None:
        """Take the open dataset ``(num_rows, *shape)``."""
        self._dataset = dataset
        self.chunk_rows = (
            int(dataset.chunks[0])
            if dataset.chunks
            else chunk_rows_for(dataset.shape[1:], dataset.dtype)
        )
        self._stored: tuple[Array, Array] | None = None

    def between(self, start: int, stop: int) -> NDArray[Any]:
        """Return rows [start, stop), decoded."""
        return np.ascontiguousarray(self._dataset[start:stop])

    def extents(self, starts: Array, stops: Array) -> tuple[Array, Array]:
        """Return the bytes of the stored chunks that hold the rows ``[starts[i], stops[i])``."""
        if self._stored is None:
            self._stored = self._stored_chunks()
        begins, ends = self._stored
        homes = [
            np.arange(start // self.chunk_rows, -(-stop // self.chunk_rows))
            for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)
        ]
        wanted = np.unique(np.concatenate([np.empty(0, np.int64), *homes]))
        wanted = wanted[wanted < len(begins)]
        return begins[wanted], ends[wanted]

    def _stored_chunks(self) -> tuple[Array, Array]:
        num_chunks = -(-len(self._dataset) // self.chunk_rows) if self._dataset.chunks else 0
        begins, ends = np.zeros((2, num_chunks), np.int64)

        def note(chunk: Any) -> None:
            home = chunk.chunk_offset[0] // self.chunk_rows
            if home < num_chunks:  # else the file is damaged, which reading will tell
                begins[home], ends[home] = chunk.byte_offset, chunk.byte_offset + chunk.size

        if num_chunks:
            self._dataset.id.chunk_iter(note)
        return begins, ends
