"""Write a small data set with fields of every kind, and read its samples with plain h5py."""

from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.data.format.dataset_manifest import Field, Manifest, ShardEntry
from hpctrain.data.writer import ShardWriter
from tests.data.plain import read_whole

IN_MEMORY = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
"""Where files that are read a thousand times lie."""


def mixed(num_samples: int) -> dict[str, Any]:
    """Make samples of different lengths, with the labels 0, 1, 2 in the ratio 5 : 3 : 2."""
    numbers = np.arange(num_samples)
    return {
        "image": np.random.default_rng(0).random((num_samples, 3, 2), dtype=np.float32),
        "number": numbers,
        "label": np.array([0, 0, 0, 0, 0, 1, 1, 1, 2, 2], np.uint8)[numbers * 7 % 10],
        "text": [np.full(number % 5, number, np.int32) for number in numbers],
        "boxes": [np.full((number % 3, 4), number, np.float32) for number in numbers],
    }


def write_mixed(
    directory: Path,
    num_samples: int = 100,
    *,
    compression: str | None = None,
    samples_per_shard: int = 40,
) -> Manifest:
    """Write the samples in blocks of 7; images and boxes may be compressed."""
    fields = {
        "image": Field.of((3, 2), "f4", compression=compression),
        "number": Field.of((), "i8"),
        "label": Field.of((), "u1"),
        "text": Field.of((), "i4", ragged=True),
        "boxes": Field.of((4,), "f4", ragged=True, compression=compression),
    }
    with ShardWriter(
        directory, fields, samples_per_shard=samples_per_shard, block_size=7
    ) as writer:
        writer.append(mixed(num_samples))
    return writer.manifest


def shard(directory: Path, index: int = 1) -> tuple[Path, ShardEntry]:
    """Return the file of a shard, and its entry in the manifest."""
    found = Manifest.read(directory).shards[index]
    return directory / found.file, found


def samples_in(directory: Path) -> list[dict[str, Any]]:
    """Return all samples, with plain lists for values."""
    read = read_whole(directory)
    return [
        dict(zip(read, [value.tolist() for value in values], strict=True))
        for values in zip(*read.values(), strict=True)
    ]


def numbers_in(directory: Path) -> list[int]:
    """Return the field ``number`` of all samples."""
    return [int(number) for number in read_whole(directory)["number"]]


def names_in(directory: Path) -> list[str]:
    """Return the names of all files."""
    return sorted(path.name for path in directory.iterdir())


def files_of(directory: Path) -> dict[str, bytes]:
    """Return all files by name."""
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def flip(path: Path, position: int, bit: int = 0) -> None:
    """Flip one bit of a file in place; a second call restores the bit."""
    with path.open("r+b") as file:
        file.seek(position)
        (byte,) = file.read(1)
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))
