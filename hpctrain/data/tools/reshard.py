"""A data set written anew with other shards, blocks or compression; the same samples."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import Field, Manifest, classes_of
from hpctrain.data.format.rows import count
from hpctrain.data.tools.copying import stream
from hpctrain.data.tools.turns import in_turns, read_manifest, share
from hpctrain.data.tools.verify import Start
from hpctrain.data.writer import ShardWriter


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """How a data set is cut; what is None stays as it is."""

    samples_per_shard: int | None = None
    """Samples of each shard but the last."""
    shard_bytes: int | None = None
    """Or about this many bytes of samples, before compression."""
    block_size: int | None = None
    """Samples per checksum."""
    compression: str | None = None
    """``none`` or ``zstd``, of all fields."""

    def __post_init__(self) -> None:
        """Check the values."""
        for name in ("samples_per_shard", "shard_bytes", "block_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"{name} must be positive, got {value}")
        if self.samples_per_shard and self.shard_bytes:
            raise DataError("a shard is cut by its samples or by its bytes; give one of them")
        if self.compression not in (None, "none", "zstd"):
            raise DataError(f"compression is zstd or none, got {self.compression!r}")


def reshard(
    directory: Path | str,
    out: Path | str,
    shape: Shape,
    comm: Communicator | None = None,
    *,
    start: Start | None = None,
) -> Manifest:
    """Write all samples of a data set, in their order, to another directory.

    Collective with ``comm``: each rank writes some of the shards; they are the same for any
    number of ranks. Needs memory for a few MiB, or a few blocks if these are larger. Every block
    is checked as it is read. After a kill, the same call goes on with the shards that are done.

    ``start`` makes what follows the progress of this rank, in samples.

    Raises:
        DataError: the data set is damaged, or the new one cannot be written; on every rank.
    """
    directory, out, comm = Path(directory), Path(out), comm or SerialCommunicator()
    manifest = read_manifest(directory, comm)
    samples_per_shard = _samples_per_shard(manifest, shape)
    mine = share(manifest.num_samples, comm, samples_per_shard)
    advance = start(mine[1] - mine[0]) if start else lambda _: None
    writer = ShardWriter(
        out,
        _fields(manifest, shape),
        samples_per_shard=samples_per_shard,
        split=manifest.split,
        block_size=shape.block_size or manifest.block_size,
        comm=comm,
        resume_key=f"reshard {manifest.uuid}",
        may_replace=False,
        classes=classes_of(directory, manifest),
    )
    with writer:
        advance(writer.num_written)
        first = mine[0] + writer.num_written

        def copy() -> Iterator[None]:
            for _, rows in stream(directory, manifest, first, mine[1]):
                writer.append(rows)
                advance(count(rows))
                yield

        in_turns(comm, copy())
    return writer.manifest


def _samples_per_shard(manifest: Manifest, shape: Shape) -> int:
    if shape.samples_per_shard:
        return shape.samples_per_shard
    if not shape.shard_bytes:
        return max(shard.num_samples for shard in manifest.shards)
    num_samples = max(1, round(shape.shard_bytes / max(1, sample_bytes(manifest))))
    block = shape.block_size or manifest.block_size
    return num_samples // block * block or num_samples


def sample_bytes(manifest: Manifest) -> float:
    """Return the bytes of a sample, decoded, on average."""
    total = 0
    for name, field in manifest.fields.items():
        for shard in manifest.shards:
            rows = shard.places[name].num_rows if field.ragged else shard.num_samples
            total += (rows or 0) * field.sample_bytes
    return total / manifest.num_samples


def _fields(manifest: Manifest, shape: Shape) -> dict[str, Field]:
    if shape.compression is None:
        return dict(manifest.fields)
    compression = None if shape.compression == "none" else shape.compression
    return {
        name: replace(field, compression=compression) for name, field in manifest.fields.items()
    }
