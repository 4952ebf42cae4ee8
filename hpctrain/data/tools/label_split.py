"""Split a data set by label, so that the parts have different shares of each label."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.agreement import agreed, on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.core.checks import Count, Number, Positive, checked
from hpctrain.core.errors import DataError
from hpctrain.data.data_split import Split
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.tools.rank_work import Start, followed, in_turns, or_alone
from hpctrain.data.tools.rewriting import share

_PIECE = 1 << 16  # number of labels per read

Labels = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelSplit:
    """Result of ``split_by_label``: the split, and the counts of labels in each part."""

    split: Split
    labels: Labels  # labels that occur, ascending
    counts: NDArray[np.int64]  # ``(parts, labels)``: samples of each label in each part


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelShares:
    """Arguments of a split by label.

    For each label, the shares of the parts are drawn from a Dirichlet distribution.
    """

    num_parts: int
    alpha: float
    """Concentration of the distribution: with small values, a part has few labels; with ``inf``,
    all parts have equal shares of each label."""
    label: str = "y"  # field of the data set
    seed: int = 0

    def __post_init__(self) -> None:
        checked("ALPHA", self.alpha, Positive, DataError)
        checked("num_parts", self.num_parts, Number, DataError)
        checked("seed", self.seed, Count, DataError)


def split_by_label(
    directory: Path | str,
    out: Path | str,
    shares: LabelShares,
    comm: Communicator | None = None,
    *,
    start: Start | None = None,
) -> LabelSplit:
    """Divide the samples of each label among parts.

    Every sample is in one part. Only the labels are read. The split is written to the file
    ``out``; see ``Split``. Collective with ``comm``: each rank reads some of the labels.
    ``start(num_samples)`` is called once, with the number of samples that this rank reads. It
    returns a function, which is called after each piece with the number of samples in the piece.
    Raises ``DataError`` on every rank: ``out`` exists, a part would get no sample, or files cannot
    be read or written.

    Source: Li et al. 2021, arXiv:2102.02079, who draw for each label the shares of the parts. Hsu
    et al. 2019, arXiv:1909.06335, draw for each part the shares of the labels instead.
    """
    directory, out, comm = Path(directory), Path(out), or_alone(comm)
    label = shares.label
    with agreed(comm, DataError):
        if comm.rank == 0 and (out.exists() or out.is_symlink()):
            raise DataError(
                f"the file of a split must not exist, but {out} does; choose another name"
            )
    whole = ShardedDataset.open(directory, comm, io="read")
    with agreed(comm, DataError):
        labels = _labels_alone(whole, label)
    pieces: list[Labels] = []
    first, stop = share(len(whole), comm, whole.block_size)
    advance = followed(start, stop - first)

    def read(begin: int) -> None:
        some = labels.take(np.arange(begin, min(begin + _PIECE, stop)))[label]
        pieces.append(np.asarray(some).reshape(-1).astype(np.int64))
        advance(len(pieces[-1]))

    in_turns(comm, range(first, stop, _PIECE), read)
    found = np.concatenate([p for of_rank in comm.allgather_object(pieces) for p in of_rank])

    def write() -> LabelSplit:
        num_parts, alpha, seed = shares.num_parts, shares.alpha, shares.seed
        parts = parts_by_label(found, num_parts, alpha, seed)
        split = Split(whole.uuid, parts, num_parts, f"alpha={alpha} seed={seed} label={label}")
        split.write(out)
        names, numbers = np.unique(found, return_inverse=True)
        table = np.bincount(parts.astype(np.int64) * len(names) + numbers)
        counts = np.zeros(num_parts * len(names), np.int64)
        counts[: len(table)] = table
        return LabelSplit(split=split, labels=names, counts=counts.reshape(num_parts, -1))

    return on_root(comm, write, DataError)


def parts_by_label(labels: Labels, num_parts: int, alpha: float, seed: int) -> NDArray[np.uint32]:
    """Return the part of each sample. Raises ``DataError``: ``alpha`` is too small."""
    draw = np.random.default_rng(seed)
    parts = np.zeros(len(labels), np.uint32)
    by_label = np.argsort(labels, kind="stable")
    ends = np.flatnonzero(np.diff(labels[by_label])) + 1
    for samples in np.split(by_label, ends):
        shares = np.full(num_parts, 1 / num_parts)
        if alpha < 1e6:
            shares = draw.dirichlet(np.full(num_parts, alpha))
        if not np.isfinite(shares).all():
            raise DataError(
                f"ALPHA must be large enough for finite random shares, got {alpha:g}; use a "
                f"larger ALPHA"
            )
        bounds = np.rint(np.cumsum(shares)[:-1] * len(samples)).astype(np.int64)
        sizes = np.diff(bounds, prepend=0, append=len(samples))
        # For each label, the order of the parts is drawn too, so that rounding does not favour the
        # same parts.
        parts[draw.permutation(samples)] = np.repeat(
            draw.permutation(num_parts).astype(np.uint32), sizes
        )
    return parts


def _labels_alone(whole: ShardedDataset, label: str) -> ShardedDataset:
    """Return the same data set with only the field ``label``, which must hold integers."""
    manifest = whole.manifest
    field = manifest.fields.get(label)
    is_label = field and not field.ragged and field.shape in ((), (1,))
    if field is None or not is_label or np.dtype(field.dtype).kind not in "iub":
        names = ", ".join(f"{name} {f.dtype} {f.shape}" for name, f in manifest.fields.items())
        raise DataError(
            f"--label must name a field with one integer for each sample, got {label!r}, and the "
            f"fields are {names}; choose one of them"
        )
    shards = tuple(
        replace(shard, places={label: shard.places[label]}) for shard in manifest.shards
    )
    one = replace(manifest, fields={label: field}, shards=shards)
    return ShardedDataset(whole.path, io="read", manifest=one)
