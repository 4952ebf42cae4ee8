"""Faults that ``verify`` finds, the samples they cost, and the way out."""

from collections.abc import Iterable
from dataclasses import dataclass

from hpctrain.core.units import format_bytes, format_numbers

Range = tuple[int, int]  # samples ``[start, stop)`` of the data set


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One thing that is wrong with a file of a data set."""

    file: str
    what: str  # what is wrong, as the end of a sentence that begins with the file
    shard: int | None = None  # number of the shard, None for the manifest
    field: str | None = None  # the field, None where all of the file is meant
    blocks: tuple[int, ...] = ()  # damaged blocks, counted from the start of the shard
    samples: tuple[Range, ...] = ()
    """Samples that cannot be had, in growing order; none where only other bytes are damaged."""

    def __str__(self) -> str:
        lost = ", ".join(f"{start}-{stop - 1}" for start, stop in self.samples)
        return f"{self.file} {self.what}" + (f" (samples {lost})" if lost else "")


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultReport:
    """The state of a data set."""

    directory: str
    uuid: str | None = None  # None where the manifest cannot be read
    num_shards: int = 0
    num_samples: int = 0
    num_bytes: int = 0
    faults: tuple[Fault, ...] = ()  # by shard, then by field; the same on every rank
    leftovers: tuple[str, ...] = ()
    """Files of writers that were killed, and of data sets that were replaced; no fault."""

    @property
    def is_whole(self) -> bool:
        """Whether every byte is as it was written."""
        return not self.faults

    @property
    def lost(self) -> tuple[Range, ...]:
        """Samples that cannot be had, merged, in growing order."""
        return merged(samples for fault in self.faults for samples in fault.samples)

    @property
    def num_lost(self) -> int:
        """Samples that cannot be had."""
        return sum(stop - start for start, stop in self.lost)

    @property
    def bad_shards(self) -> tuple[int, ...]:
        """Numbers of the shards with a fault."""
        return tuple(sorted({f.shard for f in self.faults if f.shard is not None}))

    def lines(self) -> list[str]:
        """Return the report for people."""
        lines = [f"fault: {fault}" for fault in self.faults]
        lines += [f"leftover: {name}" for name in self.leftovers]
        if self.leftovers and self.uuid is None:
            lines.append(
                "leftovers are of a command that was stopped; the same one, run again, goes on "
                "or makes them anew"
            )
        elif self.leftovers:
            lines.append(
                f"leftovers do no harm; hpctrain data repair {self.directory} removes them"
            )
        if self.is_whole:
            return [*lines, f"whole: {self._size()}"]
        if self.uuid is None:
            repair = f"hpctrain data repair {self.directory} --from COPY"
            return [*lines, f"not whole; take the manifest from another copy: {repair}"]
        lost = (
            f"not whole: {self.num_lost} of {self.num_samples} samples cannot be had, "
            f"{len(self.bad_shards)} of {self.num_shards} shards have a fault"
        )
        way_out = (
            f"take them from another copy: hpctrain data repair {self.directory} --from COPY; "
            f"where there is none, pack the source again, or train without them: "
            f'on_corrupt="skip"'
        )
        return [*lines, lost, way_out]

    def _size(self) -> str:
        return (
            f"{self.num_samples} samples in {self.num_shards} "
            f"shard{'s' * (self.num_shards != 1)}, {format_bytes(self.num_bytes)}"
        )


def merged(ranges: Iterable[Range]) -> tuple[Range, ...]:
    """Return the union of some ranges, in growing order, none touching the next."""
    found: list[Range] = []
    for start, stop in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(stop, found[-1][1])
        else:
            found.append((start, stop))
    return tuple(found)


def name_blocks(blocks: Iterable[int]) -> str:
    """Write block numbers with their noun: ``block 3``, ``blocks 0-3,8``."""
    listed = list(blocks)
    return f"block{'s' * (len(listed) != 1)} {format_numbers(listed)}"
