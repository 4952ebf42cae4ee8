"""Rewrite a data set with other shards, blocks or compression, or split it into parts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np

from hpctrain.comm.communicator import Communicator
from hpctrain.core.checks import Number, checked
from hpctrain.core.errors import DataError
from hpctrain.core.units import MIB
from hpctrain.data.format.dataset_manifest import PLAIN_NAME, Field, Manifest, classes_of
from hpctrain.data.order.order import global_order
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.samples import Indices
from hpctrain.data.tools.rank_work import Start, followed, in_turns, or_alone
from hpctrain.data.writer import ShardWriter

PIECE_BYTES = 4 * MIB  # bytes of samples per read, unless a block is larger

_TAG = 1 << 63  # used instead of an epoch, so that a split has another permutation than any epoch

Shares = Mapping[str, Fraction]  # share of each part; they sum to 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Sizes and compression of a rewritten data set; None keeps the present value."""

    samples_per_shard: int | None = None  # samples of each shard except the last
    shard_bytes: int | None = None  # approximate bytes of each shard, before compression
    block_size: int | None = None  # samples per checksum
    compression: str | None = None  # ``none`` or ``zstd``, of all fields

    def __post_init__(self) -> None:
        for name in ("samples_per_shard", "shard_bytes", "block_size"):
            checked(name, getattr(self, name), Number | None, DataError)
        if self.samples_per_shard and self.shard_bytes:
            raise DataError(
                f"the size of shards must be given either in samples or in bytes, got "
                f"{self.samples_per_shard} samples and {self.shard_bytes} bytes; omit one"
            )
        if self.compression is not None:
            checked("compression", self.compression, Literal["none", "zstd"], DataError)


def reshard(
    directory: Path | str,
    out: Path | str,
    shape: Shape,
    comm: Communicator | None = None,
    *,
    start: Start | None = None,
) -> Manifest:
    """Write all samples of a data set, in their order, to another directory.

    Collective with ``comm``: each rank writes some of the shards. The shards are the same for any
    number of ranks. Needs a few MiB of memory, or a few blocks if blocks are larger. Every block
    is checked as it is read. After a kill, the same call resumes after the finished shards.

    ``start(num_samples)`` is called once, with the number of samples of this rank. It returns a
    function, which is called after each piece with the number of samples in the piece. Raises
    ``DataError`` on every rank: the data set is damaged, or the new data set cannot be written.
    """
    directory, out, comm = Path(directory), Path(out), or_alone(comm)
    dataset = ShardedDataset.open(directory, comm, io="read")
    manifest = dataset.manifest
    samples_per_shard = _samples_per_shard(manifest, shape)
    first, stop = share(manifest.num_samples, comm, samples_per_shard)
    advance = followed(start, stop - first)
    with ShardWriter(
        out,
        _fields(manifest, shape),
        samples_per_shard=samples_per_shard,
        split=manifest.split,
        block_size=shape.block_size or manifest.block_size,
        comm=comm,
        resume_key=f"reshard {manifest.uuid}",
        may_replace=False,
        classes=classes_of(directory, manifest),
    ) as writer:
        advance(writer.num_written)

        def copy(samples: Indices) -> None:
            writer.append(dataset.take(samples))
            advance(len(samples))

        in_turns(comm, _pieces(dataset, first + writer.num_written, stop), copy)
    return writer.manifest


def split(
    directory: Path | str,
    out: Path | str,
    shares: Shares,
    comm: Communicator | None = None,
    *,
    seed: int = 0,
    start: Start | None = None,
) -> dict[str, Manifest]:
    """Write each part of a data set to a separate directory, ``out/<part>``.

    Every sample is in exactly one part, determined by the index of the sample, the shares, and
    ``seed`` in [0, 2^64). The samples of a part keep their order. The shares must sum to 1.
    Collective with ``comm``, whose ranks divide the work. ``start(num_samples)`` is called once,
    with the number of samples of this rank. It returns a function, which is called after each
    piece with the number of samples in the piece. Raises ``DataError`` on every rank: a part would
    get no sample, the data set is damaged, or a part cannot be written.
    """
    directory, out, comm = Path(directory), Path(out), or_alone(comm)
    dataset = ShardedDataset.open(directory, comm, io="read")
    manifest = dataset.manifest
    first, stop = share(manifest.num_samples, comm, manifest.block_size)
    advance = followed(start, stop - first)
    part_of = parts_drawn(sizes_of(manifest.num_samples, shares), seed)
    with ExitStack() as stack:
        writers = [
            stack.enter_context(
                ShardWriter(
                    out / name,
                    manifest.fields,
                    samples_per_shard=max(shard.num_samples for shard in manifest.shards),
                    split=name,
                    block_size=manifest.block_size,
                    comm=comm,
                    may_replace=False,
                    classes=classes_of(directory, manifest),
                )
            )
            for name in shares
        ]

        def append_to_parts(samples: Indices) -> None:
            parts = part_of(samples)
            for number, writer in enumerate(writers):
                writer.append(dataset.take(samples[parts == number]))
            advance(len(samples))

        in_turns(comm, _pieces(dataset, first, stop), append_to_parts)
    return {name: writer.manifest for name, writer in zip(shares, writers, strict=True)}


def share(num_samples: int, comm: Communicator, step: int) -> tuple[int, int]:
    """Return start and stop of this rank's equal share, at multiples of ``step`` samples."""
    num_steps = -(-num_samples // step)
    start, stop = ((comm.rank + end) * num_steps // comm.size * step for end in (0, 1))
    return min(start, num_samples), min(stop, num_samples)


def parse_shares(texts: Sequence[str]) -> dict[str, Fraction]:
    """Return the share of each part, from texts such as ``train=0.9`` or ``test=1/10``.

    Raises ``DataError``: a text is not a share, a name occurs twice, or the sum is not 1.
    """
    shares: dict[str, Fraction] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            share = Fraction(value)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not PLAIN_NAME.fullmatch(name) or share <= 0:
            raise DataError(f"a part must be a name and a share such as train=0.9, got {text!r}")
        if name in shares:
            raise DataError(f"each part must have a separate name, got {name} twice")
        shares[name] = share
    if sum(shares.values()) != 1:
        raise DataError(
            f"the shares of all parts must sum to 1, but {' + '.join(map(str, texts))} sum to "
            f"{float(sum(shares.values())):g}"
        )
    return shares


def sizes_of(num_samples: int, shares: Shares) -> list[int]:
    """Return the number of samples of each part, rounded so that they sum to ``num_samples``.

    Raises ``DataError``: a part would get no samples.
    """
    exact = [num_samples * share for share in shares.values()]
    sizes = [int(share) for share in exact]
    lacking = sorted(range(len(sizes)), key=lambda part: sizes[part] - exact[part])
    for part in lacking[: num_samples - sum(sizes)]:
        sizes[part] += 1
    for name, size in zip(shares, sizes, strict=True):
        if not size:
            raise DataError(
                f"each part must get at least one sample, but {name} gets none of {num_samples} "
                f"samples; give it a larger share"
            )
    return sizes


def parts_drawn(sizes: Sequence[int], seed: int) -> Callable[[Indices], Indices]:
    """Draw random parts of these sizes; return a function from sample indices to part indices."""
    ends = np.cumsum(sizes)
    order = global_order(int(ends[-1]), seed, _TAG)
    return lambda samples: np.searchsorted(ends, order.positions_of(samples), side="right")


def _pieces(dataset: ShardedDataset, start: int, stop: int) -> Iterator[Indices]:
    """Cut the samples ``[start, stop)`` into pieces of whole blocks, about 4 MiB each."""
    block = dataset.block_size
    step = int(PIECE_BYTES / max(1, dataset.sample_bytes)) // block * block or block
    while start < stop:
        end = min(start // step * step + step, stop)
        yield np.arange(start, end)
        start = end


def _samples_per_shard(manifest: Manifest, shape: Shape) -> int:
    if shape.samples_per_shard:
        return shape.samples_per_shard
    if not shape.shard_bytes:
        return max(shard.num_samples for shard in manifest.shards)
    num_samples = max(1, round(shape.shard_bytes / max(1, manifest.sample_bytes)))
    block = shape.block_size or manifest.block_size
    return num_samples // block * block or num_samples


def _fields(manifest: Manifest, shape: Shape) -> dict[str, Field]:
    if shape.compression is None:
        return dict(manifest.fields)
    compression = None if shape.compression == "none" else shape.compression
    return {
        name: replace(field, compression=compression) for name, field in manifest.fields.items()
    }
