"""Some of the samples of a data set."""

import hashlib
import json
from bisect import bisect_left

import numpy as np
from numpy.typing import ArrayLike

from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.samples import Columns, Indexable, Indices, Samples, file_of


class Subset(Indexable):
    """View of some samples of a data set, numbered in the order of the given indices.

    Choose ascending indices for a window order, which reads neighbouring samples together.

    Args:
        dataset: data set that contains the samples.
        indices: indices of the samples. An ascending ``range`` is not stored; other indices need
            8 bytes each.

    Raises:
        DataError: ``indices`` is empty, out of range or not of integers.
    """

    def __init__(self, dataset: Samples, indices: range | ArrayLike) -> None:
        self.dataset = dataset
        self.fields, self.sample_bytes = dataset.fields, dataset.sample_bytes
        self.block_size = dataset.block_size  # exact only if the indices ascend without gaps
        self._range = indices if isinstance(indices, range) and indices.step > 0 else None
        given = np.asarray([] if self._range else indices)
        if given.size and given.dtype.kind not in "iu":
            raise DataError(
                f"indices of a subset must be integers, got {given.dtype}; convert a mask with "
                f"numpy.flatnonzero(mask)"
            )
        self._indices = given.astype(np.int64)
        self._length = len(self._range) if self._range else self._indices.size
        if not self._length or self._indices.ndim != 1:
            raise DataError(
                f"a subset must have a one-dimensional array of at least 1 index, got the shape "
                f"{self._indices.shape}"
            )
        ends = (self._range[0], self._range[-1]) if self._range else self._indices
        low, high = int(np.min(ends)), int(np.max(ends))
        if low < 0 or high >= len(dataset):
            raise DataError(
                f"indices of a subset must be in [0, {len(dataset)}), got {low} to {high}"
            )
        chosen = hashlib.sha256(json.dumps([dataset.uuid, str(self._range)]).encode())
        chosen.update(self._indices.tobytes())
        self.uuid = chosen.hexdigest()[:32]

    @property
    def in_memory(self) -> bool:
        """Whether all samples are in memory."""
        return self.dataset.in_memory

    def __len__(self) -> int:
        return self._length

    def take(self, indices: Indices) -> Columns:
        """Gather samples.

        Raises:
            DataError: an index is out of range.
            CorruptError: samples are damaged; the error has a range of their indices in the
                subset.
        """
        wanted = np.asarray(indices, np.int64)
        if wanted.size and not 0 <= wanted.min() <= wanted.max() < len(self):
            raise DataError(
                f"indices must be in [0, {len(self)}), got {wanted.min()} to {wanted.max()}"
            )
        chosen = self._chosen(wanted)
        try:
            return self.dataset.take(chosen)
        except CorruptError as error:
            bad = (error.start <= chosen) & (chosen < error.stop)
            raise self._own(error, int(wanted[np.argmax(bad)])) from error

    def will_need(self, indices: Indices) -> None:
        """Start to read samples into memory, and return immediately."""
        self.dataset.will_need(self._chosen(np.asarray(indices, np.int64)))

    def file_of(self, index: int) -> str | None:
        """Return the path of the file that holds a sample; None for data without files."""
        return file_of(self.dataset, int(self._chosen(np.array([index]))[0]))

    def _chosen(self, wanted: Indices) -> Indices:
        if self._range:
            return wanted * self._range.step + self._range.start
        return self._indices[wanted]

    def _own(self, error: CorruptError, index: int) -> CorruptError:
        """Return the error with indices of the subset instead of the data set."""
        known = self._range or self._indices
        if self._range or (np.diff(self._indices) > 0).all():
            first, last = bisect_left(known, error.start), bisect_left(known, error.stop)
        else:
            first, last = index, index + 1
        return CorruptError(str(error), first, last)
