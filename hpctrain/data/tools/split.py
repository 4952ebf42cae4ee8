"""The samples of a data set shared out at random to several data sets, such as train and test."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.data.format.classes import carry_classes
from hpctrain.data.format.layout import Manifest
from hpctrain.data.format.rows import RaggedRows, Rows, count
from hpctrain.data.io.copying.copy import (
    as_samples,
    in_turns,
    read_manifest,
    share,
    stream,
)
from hpctrain.data.io.copying.parts import Shares
from hpctrain.data.io.copying.split_assignment import Deal
from hpctrain.data.tools.reshard import refuse_data_set
from hpctrain.data.tools.verify import Start
from hpctrain.data.writer import ShardWriter


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
    deal = Deal(directory, manifest, mine, comm, by)
    deal.draw(shares, seed)
    advance = start(mine[1] - mine[0]) if start else lambda _: None
    with ExitStack() as stack:
        writers = [
            stack.enter_context(_writer(out / name, name, manifest, comm)) for name in shares
        ]

        def copy() -> Iterator[None]:
            for first, rows in stream(directory, manifest, *mine):
                parts = deal.parts_of(first, rows)
                for number, writer in enumerate(writers):
                    writer.append(as_samples(select(rows, parts == number)))
                advance(count(rows))
                yield

        in_turns(comm, copy())
    for name in shares:
        carry_classes(directory, out / name, comm)
    return {name: writer.manifest for name, writer in zip(shares, writers, strict=True)}


def _writer(directory: Path, name: str, manifest: Manifest, comm: Communicator) -> ShardWriter:
    return ShardWriter(
        directory,
        manifest.fields,
        samples_per_shard=max(shard.num_samples for shard in manifest.shards),
        split=name,
        block_size=manifest.block_size,
        comm=comm,
        may_replace=False,
        classes=manifest.classes,
    )


def select(rows: Rows, mask: NDArray[np.bool_]) -> Rows:
    """Return the samples for which ``mask`` is true."""
    return {name: _select(some, mask) for name, some in rows.items()}


def _select(some: NDArray[Any] | RaggedRows, mask: NDArray[np.bool_]) -> NDArray[Any] | RaggedRows:
    if not isinstance(some, RaggedRows):
        return some[mask]
    lengths = np.diff(some.offsets)
    values = some.values[some.offsets[0] : some.offsets[-1]]
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths[mask])])
    return RaggedRows(values[np.repeat(mask, lengths)], offsets)
