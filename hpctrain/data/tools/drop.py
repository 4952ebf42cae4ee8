"""A data set written anew, in its place, without samples that are lost."""

from collections.abc import Iterator
from pathlib import Path

from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import Manifest
from hpctrain.data.format.rows import count
from hpctrain.data.io.copying.copy import as_samples, in_turns, share, stream
from hpctrain.data.tools.faults import Range
from hpctrain.data.tools.inspection import Advance
from hpctrain.data.writer import ShardWriter


def drop(
    directory: Path,
    manifest: Manifest,
    lost: tuple[Range, ...],
    comm: Communicator,
    advance: Advance,
) -> Manifest:
    """Replace a data set by its samples outside of ``lost``, in the same order.

    Collective. Needs room for both until the end; until then the old one stays.

    Args:
        directory: of the data set.
        manifest: of the data set.
        lost: in growing order, none touching the next.
        comm: ranks that share the work.
        advance: told how many samples this rank has written.

    Returns:
        The manifest of the new data set.

    Raises:
        DataError: nothing is left, or it cannot be read or written; on every rank.
    """
    if sum(stop - start for start, stop in lost) == manifest.num_samples:
        raise DataError(f"no sample of {directory} can be had, so nothing is changed")
    start, stop = share(manifest.num_samples, comm, manifest.block_size)
    writer = ShardWriter(
        directory,
        manifest.fields,
        samples_per_shard=max(shard.num_samples for shard in manifest.shards),
        split=manifest.split,
        block_size=manifest.block_size,
        comm=comm,
        classes=manifest.classes,
    )
    with writer:

        def copy() -> Iterator[None]:
            for first, last in kept(lost, start, stop):
                for _, rows in stream(directory, manifest, first, last, check=False):
                    writer.append(as_samples(rows))
                    advance(count(rows))
                    yield

        in_turns(comm, copy())
    return writer.manifest


def kept(lost: tuple[Range, ...], start: int, stop: int) -> Iterator[Range]:
    """Return what is left of the samples ``[start, stop)``."""
    for first, last in lost:
        if start < min(first, stop):
            yield start, min(first, stop)
        start = max(start, last)
    if start < stop:
        yield start, stop
