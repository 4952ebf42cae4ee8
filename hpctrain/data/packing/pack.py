"""Pack arrays, images, tables, archives, text or Python objects into a data set."""

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path

from hpctrain.comm.agreement import agreed, on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.atomic import reason_of
from hpctrain.core.checks import Number, checked
from hpctrain.core.errors import DataError
from hpctrain.core.logs import logger
from hpctrain.core.paths import absolute
from hpctrain.core.units import MIB
from hpctrain.data.format.dataset_manifest import CLASSES, MANIFEST, Manifest
from hpctrain.data.packing.files import fingerprint
from hpctrain.data.packing.kinds import PYTHON, kind_of, open_source
from hpctrain.data.packing.source import LoadedSamples, PackSource, WantedFields
from hpctrain.data.writer import BLOCK_SIZE, ShardWriter

SHARD_BYTES = 512 * MIB
SHUFFLED_BYTES = 4096 * MIB  # limit of a shuffle in memory, over all ranks

Start = Callable[[int | None, int], Callable[[int], None]]
"""Function ``start(num_samples, num_packed)`` that begins a progress report. ``num_samples`` is
the number of samples of this rank, or None if it is unknown; ``num_packed`` of these samples are
packed already. The returned function is called with the number of samples of each batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackConfig(WantedFields):
    """Options of packing: fields to read, and format of the data set."""

    kind: str | None = None
    """Kind of the source: arrays, hdf5, tar, csv, parquet, arrow, text, folder or python; None to
    infer the kind from the names of the files."""
    split: str = "train"  # name of this part of the data; a directory holds one split
    samples_per_shard: int | None = None
    """Samples of each file, except the last file of each rank; None derives the number from
    ``shard_bytes``."""
    shard_bytes: int = SHARD_BYTES  # approximate bytes of a shard before compression
    block_size: int = BLOCK_SIZE
    """Samples per crc32; a window order reads at least one such block at a time."""
    compression: str | None = None  # ``zstd``, or None, which is fastest to read
    shuffle: int | None = None
    """Seed of the order in which samples are written; None keeps the order of the source."""
    overwrite: bool = False  # whether to replace a data set in the directory

    def __post_init__(self) -> None:
        for name in ("samples_per_shard", "shard_bytes", "block_size", "length"):
            checked(name, getattr(self, name), Number | None, DataError)
        if self.resize is not None and (min(self.resize) < 1 or self.encoded):
            raise DataError(
                f"images must be resized to at least 1x1, or stay encoded, got --resize "
                f"{self.resize[0]}x{self.resize[1]}{' and --encoded' * self.encoded}"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """Manifest of the packed data set, and notes for the user."""

    manifest: Manifest
    notes: tuple[str, ...]  # notes for the user, one sentence each; also logged


def pack(
    source: object,
    directory: Path | str,
    config: PackConfig | None = None,
    *,
    comm: Communicator | None = None,
    start: Start | None = None,
) -> Packed:
    """Pack a source, such as files or a Python object, into a data set.

    Collective over ``comm``: each rank packs a contiguous share of the samples, or of the files if
    the number of samples is unknown. Only the boundaries of shards depend on the number of ranks.
    After a kill, the same call continues after the finished shards.

    Args:
        source: path of a file or a folder, a pattern such as ``"shards/*.tar"``, a function as
            ``"module:function"``, or an object with samples. The object must have ``len()`` and
            ``[index]``, or allow several iterations.
        directory: directory of the data set, created if missing.
        config: fields to pack, and options.
        comm: ranks that pack together.
        start: ``start(num_samples, num_packed)`` is called once. ``num_samples`` is the number of
            samples of this rank, or None if it is unknown; ``num_packed`` of these samples are
            packed already. The function that ``start`` returns is called with the number of
            samples of each packed batch.

    Returns:
        The manifest and notes, the same on every rank.

    Raises:
        DataError: on every rank, if the source cannot be read, its samples differ in shape, the
            directory cannot be written, or the directory has a data set already. An existing data
            set does not change. If the user's function raises an exception on a rank, this rank
            raises the same exception, and the other ranks raise a DataError.
    """
    config = config or PackConfig()
    comm = comm or SerialCommunicator()
    with agreed(comm, DataError):
        directory = absolute(directory)
    found, key = _opened(source, directory, config, comm)
    notes = (*found.notes, *_idle_ranks(found, comm.size))
    for note in notes if comm.rank == 0 else ():
        logger.info("%s", note)
    with ShardWriter(
        directory,
        found.fields,
        samples_per_shard=_samples_per_shard(found, config, comm.size),
        split=config.split,
        block_size=config.block_size,
        compression=config.compression,
        comm=comm,
        resume_key=key,
        may_replace=config.overwrite,
        classes=found.classes,
    ) as writer:
        _write(writer, found, config.shuffle, comm, start)
    if not found.classes:  # remove the file of the replaced data set
        on_root(comm, partial((directory / CLASSES).unlink, missing_ok=True), DataError)
    return Packed(manifest=writer.manifest, notes=notes)


def _write(
    writer: ShardWriter,
    found: PackSource,
    seed: int | None,
    comm: Communicator,
    start: Start | None,
) -> None:
    done = writer.num_written
    advance = start(found.share_length(comm.rank, comm.size), done) if start else None
    with _explained():
        for batch in found.share(comm.rank, comm.size, skip=done, seed=seed):
            writer.append(batch)
            if advance:
                advance(len(next(iter(batch.values()))))


def _opened(
    source: object, directory: Path, config: PackConfig, comm: Communicator
) -> tuple[PackSource, str | None]:
    """Examine a source on rank 0, or on each rank if the source is a Python object.

    Returns, on every rank, the source and its resume key. An interrupted packing can be resumed as
    long as the key does not change; None if it cannot be resumed.
    """
    kind = on_root(comm, partial(_kind_of, source, directory, config), DataError)
    is_on_each = kind == PYTHON
    found: PackSource | None = None
    key: str | None = None
    with agreed(comm, DataError), _explained():
        if comm.rank == 0 or is_on_each:
            found = open_source(source, kind, config)
            if found.is_indexed and not found.num_samples:
                raise DataError(f"a data set must have at least one sample, but {source} has none")
            if not found.is_indexed and config.shuffle is not None:
                loaded = LoadedSamples(found, SHUFFLED_BYTES // comm.size)
                found = replace(found, runs=[(len(loaded), loaded)], parts=())
            key = _key(found, source, replace(config, kind=kind), comm.size)
    if not is_on_each:
        found = comm.broadcast_object(found)
    assert found is not None
    return found, comm.broadcast_object(key)


def _kind_of(source: object, directory: Path, config: PackConfig) -> str:
    if (directory / MANIFEST).exists() and not config.overwrite:
        raise DataError(
            f"{directory} already contains a data set; choose another directory, or replace it "
            f"with --overwrite"
        )
    with _explained():
        return kind_of(source, config.kind)


def _key(found: PackSource, source: object, config: PackConfig, size: int) -> str | None:
    if not isinstance(source, str | Path):
        return None  # another object of this type may have other samples
    files = fingerprint(chain(found.files, found.code))
    options = {**asdict(config), "overwrite": None, "size": size}
    # Several functions can be defined in one file, so the name of the function is needed too.
    name = None if found.files else str(source)
    text = json.dumps([files, name, options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


@contextmanager
def _explained() -> Iterator[None]:
    """Raise errors of the operating system about a source as ``DataError``."""
    try:
        yield
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or 'the source'}: {reason_of(error)}; check the "
            f"path and its permissions"
        ) from error
    except MemoryError as error:
        raise DataError(
            f"a few samples of the source must fit into memory together, but do not: "
            f"{reason_of(error)}; check the shapes in the source, or pack smaller samples"
        ) from error


def _idle_ranks(source: PackSource, size: int) -> tuple[str, ...]:
    """Return a note if some ranks have no work, otherwise nothing."""
    num_parts = len(source.parts)
    if num_parts < size and not source.is_indexed:
        parts, packs = ("part", "packs") if num_parts == 1 else ("parts", "pack")
        note = f"{num_parts} of {size} ranks {packs}, because the source has {num_parts} {parts}"
        return (note,)
    return ()


def _samples_per_shard(found: PackSource, config: PackConfig, size: int) -> int:
    if config.samples_per_shard is not None:
        return config.samples_per_shard
    fitting = int(config.shard_bytes / max(found.sample_bytes, 1))
    whole_blocks = max(fitting // config.block_size, 1) * config.block_size
    if found.is_indexed:
        return min(whole_blocks, -(-found.num_samples // size))
    return whole_blocks
