"""Divide a data set into parts, such as clients, and assign the parts to ranks."""

import zipfile
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.atomic import explained_writes, publishing, reason_of
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import DataError
from hpctrain.core.formats import fault_of, stamp
from hpctrain.core.paths import absolute
from hpctrain.core.python_compat import Self
from hpctrain.core.units import shortened
from hpctrain.data.order.order import Order
from hpctrain.data.samples import Indices, Samples
from hpctrain.data.steps import Division, Steps
from hpctrain.data.subset import Subset

VERSION, READER = 1, "1.0"  # version of the format, and the oldest hpctrain that reads it

_DAMAGE = (ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile)


class Split:
    """Assignment of each sample of a data set to a part, such as the client that owns the sample.

    ``hpctrain data split --by-label`` writes the assignment to a file, 4 bytes per sample, and
    does not change the data set.

    Args:
        uuid: identifier of the data set.
        parts: ``(samples,)`` uint32, the part of each sample, in [0, num_parts).
        num_parts: number of parts; each must have a sample.
        about: description of the assignment.

    Raises:
        DataError: a part is out of range or has no samples.
    """

    def __init__(
        self, uuid: str, parts: NDArray[np.uint32], num_parts: int, about: str = ""
    ) -> None:
        is_array = isinstance(parts, np.ndarray)
        if not is_array or not parts.size or parts.ndim != 1 or parts.dtype != np.uint32:
            raise DataError(
                f"parts of a split must be an array of uint32 with the part of each sample, of "
                f"shape (samples,), got "
                f"{f'{parts.dtype} {parts.shape}' if is_array else type(parts).__name__}"
            )
        self.uuid, self.parts, self.about = uuid, parts, about
        self.num_parts = num_parts
        self.sizes = np.bincount(parts, minlength=num_parts)  # samples of each part
        empty = np.flatnonzero(self.sizes == 0)
        if len(self.sizes) != num_parts:
            raise DataError(
                f"parts of a split must be in [0, num_parts), got part {len(self.sizes) - 1} and "
                f"num_parts {num_parts}; use a larger num_parts"
            )
        if empty.size:
            which = f"part{'s' if empty.size > 1 else ''} {shortened(empty, 8)}"
            raise DataError(
                f"each of the {num_parts} parts must have a sample, but {which} would "
                f"have none of the {parts.size} samples; use fewer parts, a larger ALPHA or "
                f"another seed"
            )

    @classmethod
    def read(cls, path: Path | str) -> Self:
        """Read a file that ``hpctrain data split --by-label`` wrote.

        Raises ``DataError``: the file cannot be read, is damaged, or has a newer format.
        """
        try:
            with np.load(absolute(path), allow_pickle=False) as file:
                stamped = {name: file[name].item() for name in stamp(0, "") if name in file}
                if fault := fault_of(stamped, VERSION):
                    raise DataError(f"the split {path} cannot be read: {fault}")
                number = int(file["num_parts"])
                return cls(str(file["uuid"]), file["parts"], number, str(file["about"]))
        except OSError as error:
            raise DataError(
                f"cannot read the split {path}: {reason_of(error)}; write it with hpctrain "
                f"data split --by-label, or check the path"
            ) from error
        except _DAMAGE as error:
            raise DataError(
                f"{path} must be an undamaged file of hpctrain data split --by-label, but reading "
                f"it failed: {error}; write the file again"
            ) from error

    def write(self, path: Path | str) -> None:
        """Write the file atomically. Raises ``DataError``: the file cannot be written."""
        with (
            explained_writes("the file of a split", path, "choose another name", DataError),
            publishing(absolute(path)) as part,
            part.open("wb") as file,
        ):
            texts = {"uuid": self.uuid, "about": self.about, **stamp(VERSION, READER)}
            np.savez(file, parts=self.parts, num_parts=np.int64(self.num_parts), **texts)

    @cached_property
    def checksum(self) -> str:
        """Checksum of ``parts``, 8 hexadecimal digits."""
        return f"{crc32(np.ascontiguousarray(self.parts).tobytes()):08x}"

    def parts_of(self, rank: int, size: int) -> range:
        """Return the parts of a rank, which are consecutive.

        The numbers of parts of two ranks differ by at most one. Raises ``DataError``: there are
        fewer parts than ranks, or ``rank`` is out of range.
        """
        num_parts = self.num_parts
        if not 0 <= rank < size:
            raise DataError(f"rank must be in [0, size), got rank {rank} of {size}")
        if num_parts < size:
            raise DataError(
                f"each rank must have a part of the data, got {num_parts} parts and {size} "
                f"ranks; use fewer ranks, or split the data into more parts"
            )
        return range(num_parts * rank // size, num_parts * (rank + 1) // size)

    def subset(self, dataset: Samples, rank: int, size: int) -> Subset:
        """Return the samples of the rank's parts, in the order of the data set.

        Raises ``DataError``: the split belongs to another data set, or there are fewer parts than
        ranks.
        """
        self.check(dataset)
        return Subset(dataset, np.flatnonzero(self.holds(self.parts_of(rank, size), self.parts)))

    def check(self, dataset: Samples) -> None:
        """Raise ``DataError`` if this split belongs to another data set."""
        if (self.uuid, len(self.parts)) != (dataset.uuid, len(dataset)):
            raise DataError(
                f"a split must belong to the data set, but it was written for data set "
                f"{self.uuid} with {len(self.parts)} samples, and this data set is "
                f"{dataset.uuid} with {len(dataset)} samples; write a split of this data set "
                f"with hpctrain data split --by-label"
            )

    @staticmethod
    def holds(own: range, parts: NDArray[Any]) -> NDArray[np.bool_]:
        """Return, for each element of ``parts``, whether it is in the range ``own``."""
        return (parts >= own.start) & (parts < own.stop)


class SplitSteps(Steps):
    """Steps in which each rank reads the samples of its parts, as assigned by a ``Split``.

    Each step has samples of every part in proportion to the size of the part, so the samples of
    all parts end at the same step of an epoch. The samples of a step do not depend on the number
    of ranks.

    ``order`` is an order of all samples; the samples of each part are read in this order. See
    ``Steps`` for the other arguments.
    """

    def __init__(self, split: Split, order: Order, division: Division, positions: range) -> None:
        super().__init__(_Line(split, order), division, positions)
        self._parts, self._own = split.parts, split.parts_of(division.rank, division.size)

    def _mine(self, starts: Indices, batch: int) -> Indices:
        return starts[:, None] + np.arange(batch)

    def _plan(self, group: int) -> list[Indices]:
        steps = super()._plan(group)
        return [step[Split.holds(self._own, self._parts[step])] for step in steps]


class _Line:
    """Order of an epoch that interleaves all parts in proportion to their sizes."""

    def __init__(self, split: Split, order: Order) -> None:
        samples = order.samples_at(np.arange(len(split.parts)))
        samples = samples[np.argsort(split.parts[samples], kind="stable")]
        sizes = split.sizes
        number = np.arange(len(samples)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        place = (number + 0.5) / np.repeat(sizes, sizes)
        self._samples: Indices = samples[np.argsort(place, kind="stable")]

    def samples_at(self, positions: Indices) -> Indices:
        """Return the samples at ``positions`` of the epoch."""
        return self._samples[positions]
