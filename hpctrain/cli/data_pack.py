"""``hpctrain data pack``: make a data set of what is there."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hpctrain.cli.options import argument, flag, option
from hpctrain.core.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hpctrain.comm.communicator import Communicator
    from hpctrain.data.format.dataset_manifest import Manifest
    from hpctrain.data.packing.pack import PackConfig

_RESIZE = re.compile(r"(\d+)(?:x(\d+))?")


def pack(  # noqa: PLR0913 - a command's options
    source: Annotated[
        str,
        argument(
            "SOURCE", "File, folder, pattern in quotes such as 'shards/*.tar', or module:function."
        ),
    ],
    directory: Annotated[Path, argument("DIR", "Where the data set goes.")],
    *,
    field: Annotated[
        list[str] | None,
        option(
            "NAME=WHAT",
            "A field, and what of the source it holds; may be repeated. Without it, all there is.",
            "--field",
        ),
    ] = None,
    kind: Annotated[
        str | None,
        option(
            "KIND",
            "arrays, hdf5, tar, csv, parquet, arrow, text, folder or python, where the name of "
            "SOURCE does not tell.",
            "--as",
        ),
    ] = None,
    split: Annotated[str, option("NAME", "Name of this part of the data.")] = "train",
    samples_per_shard: Annotated[int | None, option("N", "Samples of a shard.", min=1)] = None,
    shard_size: Annotated[
        str | None, option("SIZE", "About how large a shard is.", default="512 MiB")
    ] = None,
    block_size: Annotated[int, option("N", "Samples per checksum.", min=1)] = 16,
    compression: Annotated[
        str | None, option("zstd", "Trade speed of reading for disk space.", default="none")
    ] = None,
    shuffle: Annotated[
        int | None,
        option(
            "SEED",
            "Write samples in another order, for instance where they are sorted by class.",
            default="off",
            min=0,
        ),
    ] = None,
    resize: Annotated[str | None, option("HxW", "Bring images to one size, in pixels.")] = None,
    encoded: Annotated[bool, flag("Keep images as they are in their files.", "--encoded")] = False,
    ragged: Annotated[
        list[str] | None,
        option(
            "NAME",
            "A field whose samples differ in length, where the first ones do not show it; may be "
            "repeated.",
        ),
    ] = None,
    length: Annotated[
        int | None, option("N", "Cut text into samples of N bytes or tokens.", min=1)
    ] = None,
    tokenizer: Annotated[
        str | None,
        option("MODULE:FUNCTION", "From text to whole numbers.", default="the bytes of the text"),
    ] = None,
    overwrite: Annotated[bool, flag("Replace a data set that DIR holds.", "--overwrite")] = False,
) -> None:
    """Make a data set of arrays, images, tables, archives, text or Python objects.

    All ranks that were started together share the work. After a kill, the same
    command goes on where the finished shards end. What is read is never changed.

    A field whose WHAT ends in a type, such as :f4 or :i8, is stored in that
    type. NumPy's default is f8 (float64), which a model in float32 refuses.

    Arrays (.npy, .npz), a field for each array of an .npz:

      hpctrain data pack digits.npz data/train

      hpctrain data pack digits.npz data/train --field x=x:f4 --field y=y

      hpctrain data pack x.npy data/train --field x=x.npy --field y=y.npy

    HDF5 (.h5, .hdf5), a field for each dataset:

      hpctrain data pack big.h5 data/train --field x=/images --field y=/labels

    Images (.jpg, .png, ...), one folder for each class; fields image and label.
    Images of different sizes stay encoded, unless they are brought to one size:

      hpctrain data pack photos/ data/train --resize 224x224 --shuffle 0

    Arrays, one .npy for each sample, one folder for each class; array and label:

      hpctrain data pack spectra/ data/train --field x=array --field y=label

    Archives of webdataset (.tar, .tar.gz), a field for each ending:

      hpctrain data pack 'shards/*.tar' data/train --field x=jpg --field y=cls

      hpctrain data pack shards/ data/train --field x=jpg:bytes --field y=cls

    Tables (.csv, .tsv, .parquet, .arrow), a field for each column, or for
    several; columns of CSV stay as they are written with :text:

      hpctrain data pack table.csv data/train --field x=width,height:f4

      hpctrain data pack table.csv data/train --field id=id:text --field x=width

    A folder of Hugging Face's save_to_disk(), of numbers, texts and lists:

      hpctrain data pack saved/train data/train --field x=input_ids --field y=label

    Text (.txt), lines as bytes, or samples of one length, of bytes or tokens:

      hpctrain data pack books/ data/train

      hpctrain data pack books/ data/train --length 256 --tokenizer my_code:tokens

    Whatever a function of yours returns that yields dicts of arrays, or has a
    length and an index, such as a data set of torch:

      hpctrain launch -n 8 hpctrain data pack my_code:make_set data/train
    """
    from hpctrain.core.units import parse_bytes  # noqa: PLC0415
    from hpctrain.data.packing.pack import SHARD_BYTES, PackConfig  # noqa: PLC0415

    if samples_per_shard is not None and shard_size is not None:
        raise ConfigError(
            f"a shard ends after so many samples, or so many bytes: got --samples-per-shard "
            f"{samples_per_shard} and --shard-size {shard_size}; leave one out"
        )
    config = PackConfig(
        fields=_fields(field or []),
        ragged=tuple(ragged or ()),
        resize=_size(resize) if resize else None,
        encoded=encoded,
        length=length,
        tokenizer=tokenizer,
        kind=kind,
        split=split,
        samples_per_shard=samples_per_shard,
        shard_bytes=parse_bytes(shard_size) if shard_size else SHARD_BYTES,
        block_size=block_size,
        compression=compression,
        shuffle=shuffle,
        overwrite=overwrite,
    )
    _run(source, directory, config)


def _fields(options: list[str]) -> dict[str, str]:
    fields: dict[str, str] = {}
    for text in options:
        name, equals, what = text.partition("=")
        if not (name.isidentifier() and equals and what) or name in fields:
            raise ConfigError(
                f"--field is NAME=WHAT, each NAME a word and given once, such as "
                f"--field x=images; got {text!r}"
            )
        fields[name] = what
    return fields


def _size(text: str) -> tuple[int, int]:
    match = _RESIZE.fullmatch(text)
    if not match:
        raise ConfigError(f"--resize is height x width in pixels, such as 224x224; got {text!r}")
    return int(match[1]), int(match[2] or match[1])


def _run(source: str, directory: Path, config: "PackConfig") -> None:
    from hpctrain.cli.shared_work import ToolBar, ranks  # noqa: PLC0415
    from hpctrain.data.format.dataset_manifest import CLASSES  # noqa: PLC0415
    from hpctrain.data.packing.pack import pack as pack_source  # noqa: PLC0415

    with ranks() as comm, ToolBar("packing", comm) as bar:
        packed = pack_source(source, directory, config, comm=comm, start=bar.start)
    manifest = packed.manifest
    lines = [*packed.notes, summary(directory, manifest)]
    for name, field in manifest.fields.items():
        shape = ", ".join(map(str, (*(["length"] if field.ragged else []), *field.shape)))
        lines.append(f"  {name:12} {field.dtype.lstrip('|<')} ({shape})")
    if manifest.classes:
        lines.append(f"  {len(manifest.classes)} classes, named in {CLASSES}")
    say(comm, lines)


def say(comm: "Communicator | None", lines: "Iterable[str]") -> None:
    """Print lines, once for all ranks."""
    for line in lines if comm is None or comm.rank == 0 else ():
        typer.echo(line)


def summary(directory: Path, manifest: "Manifest") -> str:
    """Tell in one line what was written."""
    from hpctrain.core.units import format_bytes  # noqa: PLC0415

    size, num_shards = format_bytes(manifest.num_bytes), len(manifest.shards)
    shards = f"{num_shards} shard{'s' * (num_shards != 1)}"
    return f"{directory}: {manifest.num_samples} samples in {shards}, {size}"
