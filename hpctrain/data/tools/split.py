"""The samples of a data set shared out at random to several data sets, such as train and test."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import PLAIN_NAME, Manifest, classes_of
from hpctrain.data.format.rows import RaggedRows, Rows, count
from hpctrain.data.order.order import global_order
from hpctrain.data.tools.copying import stream
from hpctrain.data.tools.faults import Range
from hpctrain.data.tools.turns import in_turns, read_manifest, share
from hpctrain.data.tools.verify import Start
from hpctrain.data.writer import ShardWriter

_TAG = 1 << 63
"""Keeps these permutations apart from those of epochs, which count from 0."""

Shares = Mapping[str, Fraction]
"""Share of each part; they sum to 1."""


def parse_shares(texts: Sequence[str]) -> dict[str, Fraction]:
    """Read shares such as ``train=0.9`` or ``test=1/10``.

    Raises:
        DataError: one cannot be read, a name comes twice, or they do not sum to 1.
    """
    shares: dict[str, Fraction] = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            share = Fraction(value)
        except (ValueError, ZeroDivisionError):
            share = Fraction(0)
        if not PLAIN_NAME.fullmatch(name) or share <= 0:
            raise DataError(f"a part is a name and a share such as train=0.9, got {text!r}")
        if name in shares:
            raise DataError(f"each part has a name of its own, got {name} twice")
        shares[name] = share
    if sum(shares.values()) != 1:
        raise DataError(
            f"the shares of all parts sum to 1, {' + '.join(map(str, texts))} sum to "
            f"{float(sum(shares.values())):g}"
        )
    return shares


def sizes_of(num_samples: Sequence[int], shares: Shares) -> NDArray[np.int64]:
    """Share out the samples of several groups, each by itself.

    A part gets the whole number below its share of a group. What remains of the group goes, one
    sample each, to those parts that lack most of their share of all groups so far. Gives
    ``(num_groups, num_parts)``; a row sums to the samples of its group.
    """
    owed = [Fraction(0)] * len(shares)
    sizes = []
    for number in num_samples:
        exact = [number * share for share in shares.values()]
        owed = [before + more for before, more in zip(owed, exact, strict=True)]
        given = [int(share) for share in exact]
        left = number - sum(given)
        lacking = sorted(range(len(given)), key=lambda part: given[part] - owed[part])
        for part in lacking[:left]:
            given[part] += 1
        owed = [before - less for before, less in zip(owed, given, strict=True)]
        sizes.append(given)
    return np.array(sizes, np.int64).reshape(-1, len(shares))


class Group:
    """Samples that are shared out together: all of them, or those with one value of a field."""

    def __init__(self, sizes: NDArray[np.int64], seed: int, number: int) -> None:
        """Draw the parts, of so many samples each; ``seed`` is in [0, 2^64)."""
        self._ends = np.cumsum(sizes)
        self._order = global_order(int(self._ends[-1]), seed, _TAG + number)

    def part_of(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the number of the part of some samples, which are counted within the group."""
        return np.searchsorted(self._ends, self._order.positions_of(samples), side="right")


_MOST_VALUES = 1 << 16


def split(  # noqa: PLR0913 - one door, by name
    directory: Path | str,
    out: Path | str,
    shares: Shares,
    comm: Communicator | None = None,
    *,
    seed: int = 0,
    by: str | None = None,
    start: Start | None = None,
) -> dict[str, Manifest]:
    """Write each part of a data set to a directory of its own, ``out/<part>``.

    Every sample is in just one part, where all keep their order. Which one is a function of
    ``seed`` in [0, 2^64), number and shares, which sum to 1. With ``by``, an integer field with a
    number for each sample, the samples of each value are shared out by themselves, so that parts
    have the same mixture of values. Collective with ``comm``, whose ranks share the work;
    ``start`` makes what follows the progress of this rank, in samples.

    Raises:
        DataError: a part would get no sample, the data set is damaged, or a part cannot be
            written; on every rank.
    """
    directory, out, comm = Path(directory), Path(out), comm or SerialCommunicator()
    manifest = read_manifest(directory, comm)
    mine = share(manifest.num_samples, comm, manifest.block_size)
    deal = _Deal(directory, manifest, mine, comm, by)
    deal.draw(shares, seed)
    advance = start(mine[1] - mine[0]) if start else lambda _: None
    with ExitStack() as stack:
        writers = [
            stack.enter_context(_writer(out / name, name, directory, manifest, comm))
            for name in shares
        ]

        def copy() -> Iterator[None]:
            for _, rows in stream(directory, manifest, *mine):
                parts = deal.parts_of(rows)
                for number, writer in enumerate(writers):
                    writer.append(_select(rows, parts == number))
                advance(count(rows))
                yield

        in_turns(comm, copy())
    return {name: writer.manifest for name, writer in zip(shares, writers, strict=True)}


def _writer(
    out: Path, name: str, directory: Path, manifest: Manifest, comm: Communicator
) -> ShardWriter:
    return ShardWriter(
        out,
        manifest.fields,
        samples_per_shard=max(shard.num_samples for shard in manifest.shards),
        split=name,
        block_size=manifest.block_size,
        comm=comm,
        may_replace=False,
        classes=classes_of(directory, manifest),
    )


class _Deal:
    """Tells the parts of the samples of this rank, in their order.

    Samples are counted by value of a field, or all together as if they had one value.
    """

    def __init__(
        self, directory: Path, manifest: Manifest, mine: Range, comm: Communicator, by: str | None
    ) -> None:
        """Count the samples of each value. Collective."""
        self._by = by
        counts: Counter[int] = Counter()
        if by is None:
            counts[0] = mine[1] - mine[0]
        else:
            _check_field(manifest, by)

        def tally() -> Iterator[None]:
            for _, rows in stream(directory, manifest, *mine, fields=(by,) if by else ()):
                values, numbers = np.unique(rows[by or ""], return_counts=True)
                counts.update(dict(zip(values.tolist(), numbers.tolist(), strict=True)))
                if len(counts) > _MOST_VALUES:
                    raise DataError(
                        f"a split by values takes a field with at most {_MOST_VALUES} values, "
                        f"{by} has more"
                    )
                yield

        in_turns(comm, tally() if by else iter(()))
        all_counts = comm.allgather_object(counts)
        self._totals = sum(all_counts, Counter())
        self._seen = sum(all_counts[: comm.rank], Counter())

    def draw(self, shares: Shares, seed: int) -> None:
        """Draw the parts of each value.

        Raises:
            DataError: a part would get no sample.
        """
        totals = sorted(self._totals.items())
        sizes = sizes_of([number for _, number in totals], shares)
        for name, size in zip(shares, sizes.sum(0).tolist(), strict=True):
            if not size:
                raise DataError(
                    f"each part gets at least one sample, {name} gets none of "
                    f"{sum(self._totals.values())}; give it a larger share"
                )
        self._groups = {
            value: Group(row, seed, number)
            for number, ((value, _), row) in enumerate(zip(totals, sizes, strict=True))
        }

    def parts_of(self, rows: Rows) -> NDArray[np.int64]:
        """Return the number of the part of each of the next samples."""
        values = np.asarray(rows[self._by]) if self._by else np.zeros(count(rows), np.int64)
        parts = np.empty(len(values), np.int64)
        order = np.argsort(values, kind="stable")
        found, starts = np.unique(values[order], return_index=True)
        for value, here in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
            numbers = self._seen[value] + np.arange(len(here))
            parts[here] = self._groups[value].part_of(numbers)
            self._seen[value] += len(here)
        return parts


def _check_field(manifest: Manifest, name: str) -> None:
    field = manifest.fields.get(name)
    if field is None:
        raise DataError(f"a split is by a field, {name} is none of {', '.join(manifest.fields)}")
    if field.ragged or field.shape or np.dtype(field.dtype).kind not in "biu":
        raise DataError(
            f"a split is by an integer field with one number for each sample, {name} has shape "
            f"{field.shape} and dtype {field.dtype}{', ragged' if field.ragged else ''}"
        )


def _select(rows: Rows, mask: NDArray[np.bool_]) -> Rows:
    """Return the samples for which ``mask`` is true."""
    return {
        name: _select_ragged(some, mask) if isinstance(some, RaggedRows) else some[mask]
        for name, some in rows.items()
    }


def _select_ragged(some: RaggedRows, mask: NDArray[np.bool_]) -> RaggedRows:
    lengths = np.diff(some.offsets)
    values: NDArray[Any] = some.values[some.offsets[0] : some.offsets[-1]]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[mask])])
    return RaggedRows(values[np.repeat(mask, lengths)], offsets)
