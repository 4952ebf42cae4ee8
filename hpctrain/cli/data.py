"""``hpctrain data``: make data sets, look at them, keep them whole."""

from contextlib import contextmanager
from dataclasses import asdict
from json import dumps
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.data_pack import pack, say, summary
from hpctrain.cli.options import AsJson, argument, option
from hpctrain.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from hpctrain.comm.communicator import Communicator
    from hpctrain.data.tools.rank_work import Start

FAULT = 1  # exit code when a data set is not whole

Directory = Annotated[Path, argument("DIR", "The data set.")]
Out = Annotated[Path, argument("OUT", "Where the new one is written.")]


def info(
    directory: Directory,
    *,
    json: AsJson = False,
    sample: Annotated[int | None, option("N", "Show this sample too.", min=0)] = None,
) -> None:
    """Tell what a data set holds: samples, fields, shards.

    Reads the manifest and the sizes of files, no data; with --sample one sample.

    For instance:

      hpctrain data info data/train

      hpctrain data info data/train --sample 0

      hpctrain data info data/train --json | jq .num_samples
    """
    from hpctrain.data.tools.info import info as info_of  # noqa: PLC0415
    from hpctrain.data.tools.info import peek  # noqa: PLC0415

    record = info_of(directory)
    shown = [] if sample is None else peek(directory, sample)
    if json:
        about = {} if sample is None else {"sample": {"index": sample, "fields": shown}}
        typer.echo(dumps(record | about, indent=1))
        return
    for line in _lines_of(record):
        typer.echo(line)
    for field in shown:
        values = " ".join(map(_shown, field["values"]))
        more = " ..." if prod(field["shape"]) > len(field["values"]) else ""
        typer.echo(f"sample {sample}: {field['name']} {field['shape']} {values}{more}")


def verify(directory: Directory, *, json: AsJson = False) -> None:
    """Check every byte of a data set against the checksums that were written with it.

    All ranks that were started together share out the shards. The exit code is 0
    if the data set is whole, 1 if anything is wrong, 2 if it could not be checked.

    For instance:

      hpctrain data verify data/train

      mpirun -n 16 hpctrain data verify data/train

      hpctrain data verify data/train --json | jq .faults
    """
    from hpctrain.data.tools.verify import verify as check  # noqa: PLC0415

    with _together("checking") as (comm, start):
        report = check(directory, comm, start=start)
    say(comm, [dumps(asdict(report), indent=1)] if json else report.lines())
    if not report.is_whole:
        raise typer.Exit(FAULT)


def repair(
    directory: Directory,
    *,
    source: Annotated[
        Path | None,
        option(
            "COPY",
            "Take damaged and missing files from another copy of the same data set.",
            "--from",
        ),
    ] = None,
) -> None:
    """Make a damaged data set whole again, and remove files that are no part of it.

    Checks it as verify does, then takes shards, and a lost manifest, from a copy.
    Each step is atomic. The exit code is 0 if the data set is whole afterwards,
    else 1.

    For instance:

      hpctrain data repair data/train --from /archive/train
    """
    from hpctrain.data.tools.repair import repair as carry_out  # noqa: PLC0415

    with _together("repairing") as (comm, start):
        outcome = carry_out(directory, source, comm, start=start)
    say(comm, [*outcome.deeds, *outcome.report.lines()])
    if not outcome.report.is_whole:
        raise typer.Exit(FAULT)


def reshard(
    directory: Directory,
    out: Out,
    *,
    samples_per_shard: Annotated[int | None, option("N", "Samples of a shard.", min=1)] = None,
    shard_size: Annotated[str | None, option("SIZE", "Bytes of a shard, about.")] = None,
    block_size: Annotated[
        int | None, option("N", "Samples of a block.", default="as it was", min=1)
    ] = None,
    compression: Annotated[
        str | None, option("zstd|none", "Of all fields.", default="as it was")
    ] = None,
) -> None:
    """Write a data set anew with other shards, blocks or compression.

    The samples and their order stay. All ranks that were started together share
    the work. After a kill, the same command goes on where the finished shards end.

    For instance:

      hpctrain data reshard data/train data/train-large --shard-size 1GiB

      mpirun -n 8 hpctrain data reshard data/train data/small --compression zstd
    """
    from hpctrain.core.units import parse_bytes  # noqa: PLC0415
    from hpctrain.data.tools.rewriting import Shape  # noqa: PLC0415
    from hpctrain.data.tools.rewriting import reshard as write  # noqa: PLC0415

    shape = Shape(
        samples_per_shard=samples_per_shard,
        shard_bytes=parse_bytes(shard_size) if shard_size else None,
        block_size=block_size,
        compression=compression,
    )
    with _together("writing") as (comm, start):
        manifest = write(directory, out, shape, comm, start=start)
    say(comm, [summary(out, manifest)])


def split(  # noqa: PLR0913 - a command's options
    directory: Directory,
    out: Annotated[Path, argument("OUT", "Folder of the parts; the file, with --by-label.")],
    shares: Annotated[
        list[str] | None, argument("NAME=SHARE...", "Such as train=0.9 test=0.1.")
    ] = None,
    *,
    seed: Annotated[int, option("N", "Another seed, other parts.", min=0)] = 0,
    by_label: Annotated[
        float | None,
        option(
            "ALPHA",
            "Give each part other shares of the labels, drawn from a Dirichlet distribution: few "
            "labels each by 0.1, equal shares by inf.",
            default="at random",
        ),
    ] = None,
    parts: Annotated[
        int | None, option("N", "Parts by label, one for each rank or more.", min=1)
    ] = None,
    label: Annotated[
        str | None, option("FIELD", "Field with the label, a whole number.", default="y")
    ] = None,
) -> None:
    """Share out the samples of a data set at random: each part is a data set, OUT/NAME.

    Every sample is in one part. The same seed makes the same parts, on any number
    of ranks. All ranks that were started together share the work.

    By label the parts are those of clients, each with labels of its own kind. The
    data set stays as it is: OUT is a file that says which sample is in which part,
    which data.split of a training, or Loader(split=OUT), gives to the ranks.

    For instance:

      hpctrain data split data/all data train=0.9 test=0.1

      hpctrain data split data/all data train=0.8 val=0.1 test=0.1 --seed 1

      hpctrain data split data/train clients.npz --by-label 0.1 --parts 4
    """
    if by_label is not None or parts is not None or label is not None:
        if by_label is None or parts is None or shares:
            raise _no_split_by_label(by_label, parts, label, shares or [])
        _split_by_label(directory, out, parts, by_label, label=label or "y", seed=seed)
        return
    if not shares:
        raise ConfigError(
            "a split takes NAME=SHARE of each part, such as train=0.9 test=0.1, or --by-label "
            "ALPHA and --parts N, got neither"
        )
    from hpctrain.data.tools.rewriting import parse_shares  # noqa: PLC0415
    from hpctrain.data.tools.rewriting import split as write  # noqa: PLC0415

    with _together("writing") as (comm, start):
        manifests = write(directory, out, parse_shares(shares), comm, seed=seed, start=start)
    say(comm, [summary(out / name, manifest) for name, manifest in manifests.items()])


def _no_split_by_label(
    by_label: float | None, parts: int | None, label: str | None, shares: list[str]
) -> ConfigError:
    if by_label is None and parts is None:
        return ConfigError(
            f"--label goes with --by-label and --parts, got --label {label} without; leave it out"
        )
    return ConfigError(
        f"a split by label takes --by-label ALPHA and --parts N, and no NAME=SHARE; got "
        f"--by-label {by_label}, --parts {parts}, {' '.join(shares) or 'no shares'}"
    )


def _split_by_label(
    directory: Path, out: Path, parts: int, alpha: float, *, label: str, seed: int
) -> None:
    from hpctrain.data.tools.label_split import LabelShares, split_by_label  # noqa: PLC0415

    shares = LabelShares(num_parts=parts, alpha=alpha, label=label, seed=seed)
    with _together("reading labels") as (comm, start):
        found = split_by_label(directory, out, shares, comm, start=start)
    names, counts = found.labels.tolist(), found.counts
    shown = range(min(len(names), _MOST_LABELS))
    more = ["..."] if len(names) > _MOST_LABELS else []
    rows = [["part", "samples", *(f"{label}={names[column]}" for column in shown), *more]]
    for number in range(min(parts, _MOST_SHARDS)):
        of = counts[number]
        rows.append([str(number), str(of.sum()), *(str(of[column]) for column in shown), *more])
    if parts > _MOST_SHARDS:
        rows.append(["..."] * len(rows[0]))
    say(comm, [*_columns(rows), f"{out}: {counts.sum()} samples in {parts} parts, by {label}"])


@contextmanager
def _together(verb: str) -> "Iterator[tuple[Communicator | None, Start]]":
    """Give the ranks that work, and what starts the bar of their progress."""
    from hpctrain.cli.shared_work import ToolBar, ranks  # noqa: PLC0415

    with ranks() as comm, ToolBar(verb, comm) as bar:
        yield comm, bar.start


_MOST_SHARDS = 20  # listed one by one; of more only the first and the last
_MOST_LABELS = 12


def _lines_of(about: "dict[str, Any]") -> "Iterator[str]":
    from hpctrain.core.units import format_bytes  # noqa: PLC0415

    yield f"{about['directory']}: {about['num_samples']} samples of the split {about['split']}"
    yield f"uuid        {about['uuid']}"
    if about["created_by"]:
        yield f"created by  {about['created_by']}"
    yield f"block size  {about['block_size']} samples"
    if about["classes"]:
        yield f"classes     {len(about['classes'])}, named in classes.txt"
    yield ""
    rows = [("field", "shape", "dtype", "compression", "bytes")]
    for field in about["fields"]:
        shape, mean = ", ".join(map(str, field["shape"])), field["mean_length"]
        if mean is not None:
            shape = f"length{', ' * bool(shape)}{shape}; mean length {mean:.1f}"
        dtype, size = field["dtype"].lstrip("|<"), format_bytes(field["num_bytes"])
        rows.append((field["name"], f"({shape})", dtype, field["compression"] or "none", size))
    yield from _columns(rows)
    yield ""
    shards = [
        (one["file"], str(one["num_samples"]), format_bytes(one["num_bytes"]), one["state"])
        for one in about["shards"]
    ]
    num_shards = len(shards)
    if num_shards > _MOST_SHARDS:
        faults = [row for row in shards[1:-1] if row[-1] != "here"]
        shards = [shards[0], *faults[:_MOST_SHARDS], ("...", "", "", ""), shards[-1]]
    yield from _columns([("shard", "samples", "bytes", "file"), *shards])
    yield f"{num_shards} shard{'s' * (num_shards != 1)}, {format_bytes(about['num_bytes'])}"


def _columns(rows: "Sequence[Sequence[str]]") -> "Iterator[str]":
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        texts = [f"{text:{width}}" for text, width in zip(row, widths, strict=True)]
        yield "  ".join(texts).rstrip()


def _shown(value: float) -> str:
    return f"{value:d}" if isinstance(value, int) else f"{value:.6g}"


EXAMPLES = """
For instance:

  hpctrain data pack photos/ data/train        a folder of images for each class

  mpirun -n 8 hpctrain data pack big.h5 data/train --field x=/images --field y=/labels

  hpctrain data info data/train

  hpctrain data verify data/train              exit code 1 if anything is damaged
"""

data = typer.Typer(
    name="data",
    help="Make sharded HDF5 data sets, look at them, check and change them.",
    epilog=EXAMPLES,
    no_args_is_help=True,
    rich_markup_mode="rich",
)
for command in (pack, info, verify, repair, reshard, split):
    data.command()(command)
