"""``hpctrain data``: create, inspect, check, repair and change data sets."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from hpctrain.cli.data_pack import app, print_on_rank_0, summary
from hpctrain.cli.options import (
    FAILED,
    AsJson,
    aligned,
    argument,
    option,
    show_json,
    takes,
)
from hpctrain.cli.shared_work import ranks
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import format_bytes, parse_size, plural
from hpctrain.data.tools import info as information
from hpctrain.data.tools import label_split, rewriting
from hpctrain.data.tools import repair as repairing
from hpctrain.data.tools import verify as checking

if TYPE_CHECKING:
    from hpctrain.data.tools.label_split import LabelSplit

MAX_ROWS = 20  # maximum number of shards or parts in a table
MAX_LABELS = 12  # maximum number of labels in a table

Directory = Annotated[Path, argument("DIR", "Directory of the data set.")]
Out = Annotated[Path, argument("OUT", "Directory of the new data set.")]


@app.command()
def info(
    directory: Directory,
    *,
    json: AsJson = False,
    sample: int | None = option(None, "N", "Also show sample N, from 0.", min=0),
) -> None:
    """Print the contents of a data set: samples, fields, shards.

    The command reads only the manifest, the sizes of files, and the sample that --sample selects.

    Examples:
      hpctrain data info data/train

      hpctrain data info data/train --sample 0

      hpctrain data info data/train --json | jq .num_samples
    """
    record = information.info(directory)
    shown = [] if sample is None else information.peek(directory, sample)
    if json:
        show_json(
            record | ({} if sample is None else {"sample": {"index": sample, "fields": shown}})
        )
        return
    for line in _lines_of(record):
        typer.echo(line)
    for field in shown:
        values = " ".join(f"{v:d}" if isinstance(v, int) else f"{v:.6g}" for v in field["values"])
        more = " ..." if prod(field["shape"]) > len(field["values"]) else ""
        typer.echo(f"sample {sample}: {field['name']} {field['shape']} {values}{more}")


@app.command()
def verify(directory: Directory, *, json: AsJson = False) -> None:
    """Check every byte of a data set against its checksums.

    All ranks of the launch share the work. The exit code is 0 if the data set is intact, 1 if the
    data set is damaged, and 2 if the check is impossible.

    Examples:
      hpctrain data verify data/train

      mpirun -n 16 hpctrain data verify data/train

      hpctrain data verify data/train --json | jq .faults
    """
    with ranks("checking") as (comm, bar):
        report = checking.verify(directory, comm, start=bar.start)
    if not json:
        print_on_rank_0(comm, report.lines())
    elif comm is None or comm.rank == 0:
        show_json(asdict(report))
    if not report.is_whole:
        raise typer.Exit(FAILED)


@app.command()
def repair(
    directory: Directory,
    *,
    source: Path | None = option(
        None,
        "COPY",
        "Another copy of the same data set, from which damaged and missing files are taken.",
        "--from",
    ),
) -> None:
    """Repair a damaged data set, and remove files that do not belong to it.

    The command checks the data set like hpctrain data verify. With --from, it
    then replaces damaged shards and a lost manifest by the files of another copy. Each replacement
    is atomic. The exit code is 0 if the data set is intact afterwards, else 1.

    Examples:
      hpctrain data repair data/train --from /archive/train
    """
    with ranks("repairing") as (comm, bar):
        outcome = repairing.repair(directory, source, comm, start=bar.start)
    print_on_rank_0(comm, [*outcome.deeds, *outcome.report.lines()])
    if not outcome.report.is_whole:
        raise typer.Exit(FAILED)


@app.command()
def reshard(
    directory: Directory,
    out: Out,
    *,
    samples_per_shard: int | None = option(
        None, "N", "Samples per shard.", shown="unchanged", min=1
    ),
    shard_size: str | None = option(
        None, "SIZE", "Approximate bytes per shard.", shown="unchanged"
    ),
    block_size: int | None = option(None, "N", "Samples per checksum.", shown="unchanged", min=1),
    compression: str | None = option(
        None, "zstd|none", "Compression of all fields.", shown="unchanged"
    ),
) -> None:
    """Write a data set again with other shards, blocks or compression.

    The samples and their order stay the same. All ranks of the launch share the work. After a
    kill, the same command continues after the last finished shard.

    Examples:
      hpctrain data reshard data/train data/train-large --shard-size 1GiB

      mpirun -n 8 hpctrain data reshard data/train data/small --compression zstd
    """
    shape = rewriting.Shape(
        samples_per_shard=samples_per_shard,
        shard_bytes=parse_size(shard_size) if shard_size else None,
        block_size=block_size,
        compression=compression,
    )
    with ranks("writing") as (comm, bar):
        manifest = rewriting.reshard(directory, out, shape, comm, start=bar.start)
    print_on_rank_0(comm, [summary(out, manifest)])


@dataclass(frozen=True, kw_only=True)
class SplitOptions:
    """Arguments and options of ``hpctrain data split``."""

    directory: Directory
    out: Path = argument("OUT", "Directory of the parts; with --by-label the file to write.")
    shares: list[str] | None = argument(
        "NAME=SHARE...", "Such as train=0.9 test=0.1.", default=None
    )
    seed: int = option(0, "N", "Seed of the random choice.", min=0)
    by_label: float | None = option(
        None,
        "ALPHA",
        "Draw the shares of each label from a Dirichlet distribution: few labels in a part for "
        "0.1, equal shares for inf.",
        shown="at random",
    )
    parts: int | None = option(
        None, "N", "Number of parts for --by-label, at least one per rank of the training.", min=1
    )
    label: str | None = option(None, "FIELD", "Field of the label, an integer.", shown="y")

    def check(self) -> None:
        """Raise ``ConfigError`` unless the options request either shares or a split by label."""
        if self.by_label is not None and self.parts is not None and not self.shares:
            return
        if self.by_label is not None or self.parts is not None:
            raise ConfigError(
                f"a split by label must have --by-label ALPHA, --parts N and no NAME=SHARE, got "
                f"--by-label {self.by_label}, --parts {self.parts}, "
                f"{' '.join(self.shares or ['no shares'])}"
            )
        if self.label is not None:
            raise ConfigError(
                f"--label must be used with --by-label and --parts, got only --label "
                f"{self.label}; omit --label"
            )
        if not self.shares:
            raise ConfigError(
                "a split must have NAME=SHARE for each part, such as train=0.9 test=0.1, or "
                "--by-label ALPHA and --parts N, got neither"
            )


@app.command()
@takes(SplitOptions)
def split(options: SplitOptions) -> None:
    """Divide the samples of a data set at random; each part is a data set, OUT/NAME.

    Every sample is in exactly one part. The same seed gives the same parts on any number of ranks.
    All ranks of the launch share the work.

    With --by-label, the parts have different label distributions, like the clients of federated
    learning. The command then writes no data sets: OUT is a file that lists the samples of each
    part. The key data.split of a training, or Loader(split=OUT), assigns the parts to the ranks.

    Examples:
      hpctrain data split data/all data train=0.9 test=0.1

      hpctrain data split data/all data train=0.8 val=0.1 test=0.1 --seed 1

      hpctrain data split data/train clients.npz --by-label 0.1 --parts 4
    """
    options.check()
    if options.by_label is not None and options.parts is not None:
        label = options.label or "y"
        with ranks("reading labels") as (comm, bar):
            by_label = label_split.LabelShares(
                num_parts=options.parts, alpha=options.by_label, label=label, seed=options.seed
            )
            found = label_split.split_by_label(
                options.directory, options.out, by_label, comm, start=bar.start
            )
        print_on_rank_0(comm, _counts_of(found, label))
        print_on_rank_0(
            comm,
            [f"{options.out}: {found.counts.sum()} samples in {options.parts} parts, by {label}"],
        )
        return
    shares = rewriting.parse_shares(options.shares or [])
    with ranks("writing") as (comm, bar):
        manifests = rewriting.split(
            options.directory, options.out, shares, comm, seed=options.seed, start=bar.start
        )
    print_on_rank_0(
        comm, [summary(options.out / name, manifest) for name, manifest in manifests.items()]
    )


def _counts_of(found: "LabelSplit", label: str) -> Iterable[str]:
    """Return the lines of a table: for each part, the number of samples with each label."""
    names, counts = found.labels.tolist(), found.counts
    shown = range(min(len(names), MAX_LABELS))
    more = ["..."] * (len(names) > MAX_LABELS)
    rows = [["part", "samples", *(f"{label}={names[column]}" for column in shown), *more]]
    for number, of in enumerate(counts[:MAX_ROWS]):
        rows.append([str(number), str(of.sum()), *(str(of[column]) for column in shown), *more])
    if len(counts) > MAX_ROWS:
        rows.append(["..."] * len(rows[0]))
    return aligned(rows)


def _lines_of(about: dict[str, Any]) -> Iterator[str]:
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
    yield from aligned(rows)
    yield ""
    shards = [
        (one["file"], str(one["num_samples"]), format_bytes(one["num_bytes"]), one["state"])
        for one in about["shards"]
    ]
    total = plural(len(shards), "shard")
    if len(shards) > MAX_ROWS:
        faults = [row for row in shards[1:-1] if row[-1] != "here"]
        shards = [shards[0], *faults[:MAX_ROWS], ("...", "", "", ""), shards[-1]]
    yield from aligned([("shard", "samples", "bytes", "file"), *shards])
    yield f"{total}, {format_bytes(about['num_bytes'])}"
