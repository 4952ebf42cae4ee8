"""The samples of a data set shared out at random to several data sets, such as train and test."""

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import Manifest, classes_of
from hpctrain.data.format.rows import RaggedRows, Rows, count
from hpctrain.data.tools.copying import stream
from hpctrain.data.tools.faults import Range
from hpctrain.data.tools.reshard import refuse_data_set
from hpctrain.data.tools.shares import Group, Shares, sizes_of
from hpctrain.data.tools.turns import in_turns, read_manifest, share
from hpctrain.data.tools.verify import Start
from hpctrain.data.writer import ShardWriter

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

    Every sample is in just one part, where all keep their order. Which one is a function of seed,
    number and shares, and with ``by`` of the values of that field. Collective with ``comm``.

    Args:
        directory: of the data set.
        out: of the parts; none of them may hold a data set.
        shares: share of each part; they sum to 1.
        comm: ranks that share the work.
        seed: another one, other parts; in [0, 2^64).
        by: an integer field with a number for each sample: the samples of each value are shared
            out by themselves, so that parts have the same mixture of values.
        start: makes what follows the progress of this rank, in samples.

    Returns:
        The manifest of each part.

    Raises:
        DataError: a part would get no sample, the data set is damaged, or a part cannot be
            written; on every rank.
    """
    directory, out, comm = Path(directory), Path(out), comm or SerialCommunicator()
    manifest = read_manifest(directory, comm)
    for name in shares:
        refuse_data_set(out / name, comm)
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
