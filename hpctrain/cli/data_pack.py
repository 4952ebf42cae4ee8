"""``hpctrain data pack``: create a data set, and the group ``hpctrain data``."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from hpctrain.cli.options import argument, flag, option, takes
from hpctrain.cli.shared_work import ranks
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import format_bytes, parse_size, plural
from hpctrain.data.format import dataset_manifest
from hpctrain.data.packing import pack as packing

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.data.format.dataset_manifest import Manifest

_RESIZE = re.compile(r"(\d+)(?:x(\d+))?")

app = typer.Typer(no_args_is_help=True)


@app.callback()
def data() -> None:
    """Create, inspect, check, repair and change sharded HDF5 data sets.

    Examples:
      hpctrain data pack photos/ data/train

      mpirun -n 8 hpctrain data pack big.h5 data/train --field x=/images --field y=/labels

      hpctrain data info data/train

      hpctrain data verify data/train
    """


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """Arguments and options of ``hpctrain data pack``."""

    source: str = argument(
        "SOURCE", "File, directory, pattern in quotes such as 'shards/*.tar', or module:function."
    )
    directory: Path = argument("DIR", "Directory of the new data set.")
    field: list[str] | None = option(
        None,
        "NAME=SOURCE",
        "A field and its source, such as x=/images; may be repeated.",
        "--field",
        shown="every field of the source",
    )
    kind: str | None = option(
        None,
        "KIND",
        "arrays, hdf5, tar, csv, parquet, arrow, text, folder or python.",
        "--as",
        shown="by the name of SOURCE",
    )
    split: str = option("train", "NAME", "Name of this split of the data.")
    samples_per_shard: int | None = option(
        None, "N", "Samples per shard.", shown="by --shard-size", min=1
    )
    shard_size: str | None = option(None, "SIZE", "Approximate bytes per shard.", shown="512 MiB")
    block_size: int = option(16, "N", "Samples per checksum.", min=1)
    compression: str | None = option(None, "zstd", "Compress: less disk space, slower reading.")
    shuffle: int | None = option(
        None,
        "SEED",
        "Write samples in random order, for instance if they are sorted by class.",
        shown="off",
        min=0,
    )
    resize: str | None = option(None, "HxW", "Resize images to H x W pixels.", shown="unchanged")
    encoded: bool = flag("Store the encoded files of images.", "--encoded")
    ragged: list[str] | None = option(
        None,
        "NAME",
        "Field with samples of different lengths, even if the first samples have equal lengths; "
        "may be repeated.",
        shown="found from the first samples",
    )
    length: int | None = option(
        None, "N", "Cut text into samples of N bytes or tokens.", shown="lines", min=1
    )
    tokenizer: str | None = option(
        None, "MODULE:FUNCTION", "Function from text to integers.", shown="the bytes of the text"
    )
    overwrite: bool = flag("Replace a data set in DIR.", "--overwrite")

    def config(self) -> "packing.PackConfig":
        """Return the configuration of the packer."""
        if self.samples_per_shard is not None and self.shard_size is not None:
            raise ConfigError(
                f"the size of a shard must be given once, got --samples-per-shard "
                f"{self.samples_per_shard} and --shard-size {self.shard_size}; omit one"
            )
        return packing.PackConfig(
            fields=_fields(self.field or []),
            ragged=tuple(self.ragged or ()),
            resize=_size(self.resize) if self.resize else None,
            encoded=self.encoded,
            length=self.length,
            tokenizer=self.tokenizer,
            kind=self.kind,
            split=self.split,
            samples_per_shard=self.samples_per_shard,
            shard_bytes=parse_size(self.shard_size or f"{packing.SHARD_BYTES} B"),
            block_size=self.block_size,
            compression=self.compression,
            shuffle=self.shuffle,
            overwrite=self.overwrite,
        )


@app.command()
@takes(PackOptions)
def pack(options: PackOptions) -> None:
    """Create a data set from arrays, images, tables, archives, text or Python objects.

    All ranks of the launch share the work. After a kill, the same command continues after the
    last finished shard. The source is never changed.

    A field whose SOURCE ends in a data type, such as :f4 or :i8, is stored in that type. NumPy's
    default is f8 (float64), which does not fit a model in float32.

    Examples:
      hpctrain data pack digits.npz data/train

    Arrays (.npy, .npz), a field for each array of an .npz:

      hpctrain data pack digits.npz data/train

      hpctrain data pack digits.npz data/train --field x=x:f4 --field y=y

      hpctrain data pack x.npy data/train --field x=x.npy --field y=y.npy

    HDF5 (.h5, .hdf5), a field for each dataset:

      hpctrain data pack big.h5 data/train --field x=/images --field y=/labels

    Images (.jpg, .png, ...), one folder for each class; fields image and label.
    Images of different sizes stay encoded, unless --resize gives them one size:

      hpctrain data pack photos/ data/train --resize 224x224 --shuffle 0

    Arrays, one .npy for each sample, one folder for each class; array and label:

      hpctrain data pack spectra/ data/train --field x=array --field y=label

    Archives of webdataset (.tar, .tar.gz), one field per file extension:

      hpctrain data pack 'shards/*.tar' data/train --field x=jpg --field y=cls

      hpctrain data pack shards/ data/train --field x=jpg:bytes --field y=cls

    Tables (.csv, .tsv, .parquet, .arrow), one field per column, or for several
    columns; :text stores a column of a CSV file as text:

      hpctrain data pack table.csv data/train --field x=width,height:f4

      hpctrain data pack table.csv data/train --field id=id:text --field x=width

    A directory of Hugging Face's save_to_disk(), with numbers, texts and lists:

      hpctrain data pack saved/train data/train --field x=input_ids --field y=label

    Text (.txt), as lines of bytes, or as samples of equal length in bytes or tokens:

      hpctrain data pack books/ data/train

      hpctrain data pack books/ data/train --length 256 --tokenizer my_code:tokens

    A Python function that returns an iterable of dicts of arrays, or an object with
    a length and an index, such as a data set of torch:

      hpctrain launch -n 8 hpctrain data pack my_code:make_set data/train
    """
    config = options.config()
    with ranks("packing") as (comm, bar):
        packed = packing.pack(
            options.source, options.directory, config, comm=comm, start=bar.start
        )
    manifest = packed.manifest
    lines = [*packed.notes, summary(options.directory, manifest)]
    for name, field in manifest.fields.items():
        shape = ", ".join(map(str, (*(["length"] if field.ragged else []), *field.shape)))
        lines.append(f"  {name:12} {field.dtype.lstrip('|<')} ({shape})")
    if manifest.classes:
        lines.append(f"  {len(manifest.classes)} classes, named in {dataset_manifest.CLASSES}")
    print_on_rank_0(comm, lines)


def _fields(options: list[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for text in options:
        name, equals, source = text.partition("=")
        if not (name.isidentifier() and equals and source) or name in fields:
            raise ConfigError(
                f"--field must be NAME=SOURCE, with a different word as NAME of each field, got "
                f"{text!r}; for example, use --field x=images"
            )
        fields[name] = source
    return fields


def _size(text: str) -> tuple[int, int]:
    match = _RESIZE.fullmatch(text)
    if not match:
        raise ConfigError(
            f"--resize must be HxW in pixels, got {text!r}; for example, use 224x224"
        )
    return int(match[1]), int(match[2] or match[1])


def print_on_rank_0(comm: "Communicator | None", lines: Iterable[str]) -> None:
    """Print lines on rank 0."""
    for line in lines if comm is None or comm.rank == 0 else ():
        typer.echo(line)


def summary(directory: Path, manifest: "Manifest") -> str:
    """Return a description of a new data set in one line."""
    shards, size = plural(len(manifest.shards), "shard"), format_bytes(manifest.num_bytes)
    return f"{directory}: {manifest.num_samples} samples in {shards}, {size}"
