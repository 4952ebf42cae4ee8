"""Make a data set of arrays, images, tables, archives, text or Python objects."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from hpctrain.core.atomic import publishing, reason_of
from hpctrain.core.errors import DataError
from hpctrain.core.logs import logger
from hpctrain.core.units import MIB
from hpctrain.data.format.classes import CLASSES
from hpctrain.data.format.layout import MANIFEST, Manifest
from hpctrain.data.packing.files import fingerprint
from hpctrain.data.packing.kinds import open_source
from hpctrain.data.packing.share import Share, note_of, share_of
from hpctrain.data.packing.source import Indexed, Source, WantedFields
from hpctrain.data.writer import BLOCK_SIZE, ShardWriter

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

SHARD_BYTES = 512 * MIB

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class PackConfig(WantedFields):
    """What is packed, and how it is written."""

    kind: str | None = None
    """Of the source: arrays, hdf5, tar, csv, parquet, text, folder, python; None to find out."""
    split: str = "train"
    """Name of this part of the data; a directory holds one."""
    samples_per_shard: int | None = None
    """Samples of each file but the last of a rank; None to let ``shard_bytes`` decide."""
    shard_bytes: int = SHARD_BYTES
    """About how large a shard becomes, before compression."""
    block_size: int = BLOCK_SIZE
    """Samples per crc32, and the least that a shuffle within a window reads at a time."""
    compression: str | None = None
    """``zstd``, or None: reading is fastest without."""
    shuffle: int | None = None
    """Seed of the order in which samples are written; None keeps that of the source."""
    overwrite: bool = False
    """Replace a data set that is in the directory already."""

    def __post_init__(self) -> None:
        """Check what can be checked before the source is seen."""
        for name in ("samples_per_shard", "shard_bytes", "block_size", "length"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DataError(f"{name} must be positive, got {value}")
        if self.per not in ("line", "paragraph", "file"):
            raise DataError(f"a sample of a text is a line, paragraph or file, got {self.per!r}")
        if self.per != "line" and self.length is not None:
            raise DataError(
                f"samples are cut to a length, or at the end of each {self.per}: "
                f"give --length {self.length} or --per {self.per}, not both"
            )
        if self.resize is not None and (min(self.resize) < 1 or self.encoded):
            raise DataError(
                f"images are brought to a size of at least 1x1, or stay encoded: got "
                f"--resize {self.resize[0]}x{self.resize[1]}{' and --encoded' * self.encoded}"
            )


class Watcher(Protocol):
    """Is told how the packing goes on."""

    def start(self, total: int | None, done: int) -> None:
        """Learn how many samples this rank packs, if known, and how many were there before."""

    def advance(self, num_samples: int) -> None:
        """Learn that samples were written."""


class Silent:
    """A watcher that does nothing."""

    def start(self, total: int | None, done: int) -> None:
        """Do nothing."""

    def advance(self, num_samples: int) -> None:
        """Do nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Packed:
    """What became of a source."""

    manifest: Manifest
    classes: tuple[str, ...]
    """Names of the labels, where the source has some."""
    notes: tuple[str, ...]
    """What a person should know, one sentence each; logged too."""


def pack(
    source: object,
    directory: Path | str,
    config: PackConfig | None = None,
    *,
    comm: "Communicator | None" = None,
    watcher: Watcher | None = None,
) -> Packed:
    """Make a data set of what is there.

    Collective over ``comm``: each rank packs a contiguous share of the samples, or where their
    number is not known beforehand, of the files; the data set is the same for any number of
    ranks, but for where its shards end. After a kill, the same call goes on where the finished
    shards end.

    Args:
        source: path of a file or a folder, a pattern such as ``"shards/*.tar"``, the name
            ``"module:function"`` of a function of yours, or an object with samples: with
            ``len()`` and ``[index]``, or one that can be iterated over more than once.
        directory: made when missing.
        config: what is packed, and how.
        comm: ranks that pack together.
        watcher: is told how it goes on, on each rank.

    Returns:
        What was packed, the same on every rank.

    Raises:
        DataError: the source cannot be read, its samples are not alike, or the directory cannot
            be written or holds a data set already; on every rank, and a data set that the
            directory held is as before. What your own function raises stays what it is on its
            rank, and is a DataError on the others.
    """
    config = config or PackConfig()
    directory = Path(directory)
    rank, size = (comm.rank, comm.size) if comm else (0, 1)
    by_name = isinstance(source, str | Path)
    found, key = _agreed(
        lambda: _examined(source, directory, config, size), comm, on_each=not by_name
    )
    notes = (*found.notes, *note_of(found, size))
    for note in notes if rank == 0 else ():
        logger.info("%s", note)
    with ShardWriter(
        directory,
        found.fields,
        samples_per_shard=_samples_per_shard(found, config, size),
        split=config.split,
        block_size=config.block_size,
        compression=config.compression,
        comm=comm,
        resume_key=key,
        may_replace=config.overwrite,
        classes=found.classes,
    ) as writer:
        share = share_of(found, config.shuffle, rank, size)
        (watcher or Silent()).start(share.total, writer.num_written)
        _write(writer, share, watcher or Silent())
    _agreed(lambda: _write_classes(directory, found.classes), comm)
    return Packed(manifest=writer.manifest, classes=found.classes, notes=notes)


def _write(writer: ShardWriter, share: Share, watcher: Watcher) -> None:
    try:
        for batch in share.batches(writer.num_written):
            writer.append(batch)
            watcher.advance(len(next(iter(batch.values()))))
    except OSError as error:
        raise DataError(
            f"cannot read {error.filename or 'the source'}: {reason_of(error)}; check the source"
        ) from error
    except MemoryError as error:
        raise _too_large(error) from error


def _agreed(function: Callable[[], T], comm: "Communicator | None", *, on_each: bool = False) -> T:
    """Call a function on rank 0, or on each rank; its error is one of every rank.

    Returns:
        What it returned on rank 0, or with ``on_each`` on this rank.

    Raises:
        DataError: it raised one, or an OSError; what else it raised stays what it is, on its
            rank.
    """
    result: T | None = None
    failure: Exception | None = None
    if on_each or comm is None or comm.rank == 0:
        try:
            result = function()
        except MemoryError as error:
            failure = _too_large(error)
        except Exception as error:  # raised again below, when all ranks know
            failure = error
    message = _told(failure)
    if comm is not None and comm.size > 1:
        messages = comm.allgather_object(message)
        message = message or next(filter(None, messages), "")
        if not message and not on_each:
            result = comm.broadcast_object(result)
    if failure is not None and not isinstance(failure, DataError | OSError):
        raise failure
    if message:
        raise DataError(message) from failure
    return result  # type: ignore[return-value]


def _too_large(error: MemoryError) -> DataError:
    return DataError(
        f"some samples of the source fit into memory at a time, these do not: {reason_of(error)}; "
        f"check what the source says of their size, or pack smaller ones"
    )


def _told(error: Exception | None) -> str:
    if error is None:
        return ""
    if isinstance(error, OSError):
        return f"cannot read {error.filename or 'the source'}: {reason_of(error)}; check the path"
    return str(error) if isinstance(error, DataError) else f"{type(error).__name__}: {error}"


def _examined(
    source: object, directory: Path, config: PackConfig, size: int
) -> tuple[Source, str | None]:
    if (directory / MANIFEST).exists() and not config.overwrite:
        raise DataError(
            f"a directory holds one data set, {directory} holds one already; choose another "
            f"directory, or replace it with --overwrite"
        )
    found = open_source(source, config.kind, config)
    if isinstance(found, Indexed) and not len(found):
        raise DataError(f"a data set needs at least one sample, {source} has none")
    share_of(found, config.shuffle, 0, size)
    if not isinstance(source, str | Path):
        return found, None  # nobody can tell whether another object has the same samples
    return found, _key(found, str(source), config, size)


def _key(found: Source, source: str, config: PackConfig, size: int) -> str:
    """Return what stays the same as long as a killed packing can go on: source and options."""
    files = fingerprint(chain(found.files, found.code))
    options = {**asdict(config), "overwrite": None, "size": size, "kind": type(found).__name__}
    # One module may have many functions, which all have the same file of code.
    name = None if found.files else source
    text = json.dumps([files, name, options], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _samples_per_shard(found: Source, config: PackConfig, size: int) -> int:
    if config.samples_per_shard is not None:
        return config.samples_per_shard
    fitting = int(config.shard_bytes / max(found.sample_bytes, 1))
    whole_blocks = max(fitting // config.block_size, 1) * config.block_size
    if isinstance(found, Indexed):
        return min(whole_blocks, -(-len(found) // size))
    return whole_blocks


def _write_classes(directory: Path, classes: tuple[str, ...]) -> None:
    path = directory / CLASSES
    if not classes:
        path.unlink(missing_ok=True)
        return
    with publishing(path) as part:
        part.write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
