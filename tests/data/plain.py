"""Read a data set with h5py only, as a reference for faster readers."""

import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import h5py
import hdf5plugin  # noqa: F401 - lets HDF5 find zstd

from hpctrain.core.atomic import crc32_of
from hpctrain.data.format.dataset_manifest import Field, Manifest, Place


def read_whole(directory: Path) -> dict[str, Any]:
    """Return every sample, as one list per field, after checking all checksums."""
    manifest = Manifest.read(directory)
    samples: dict[str, Any] = {name: [] for name in manifest.fields}
    num_before = 0
    for number, shard in enumerate(manifest.shards):
        path = directory / shard.file
        assert (path.stat().st_size, crc32_of(path)) == (shard.num_bytes, shard.crc32)
        with h5py.File(path, locking=False) as file:
            about = (number, shard.num_samples, num_before, manifest.uuid, 1)
            names = ("shard", "n", "first_index", "dataset_uuid", "complete")
            assert tuple(file.attrs[name] for name in names) == about
            for name, field in manifest.fields.items():
                place = shard.places[name]
                found = read_field(file, name, field, place)
                assert len(found) == shard.num_samples
                check_crcs(file, name, found, manifest.block_size, place)
                check_offsets(path, file, name, place)
                samples[name] += found
        num_before += shard.num_samples
    return samples


def read_field(file: h5py.File, name: str, field: Field, place: Place) -> list[Any]:
    data = file[f"data/{name}"]
    assert (data.shape[1:], data.dtype) == (field.shape, field.dtype)
    if not field.ragged:
        return list(data[:])
    index = file[f"index/{name}"][:]
    assert index.dtype == "<u8"
    assert zlib.crc32(index.data) == place.index_crc32
    assert place.num_rows == len(data) == index[-1]
    return [data[start:stop] for start, stop in pairwise(index)]


def check_crcs(
    file: h5py.File, name: str, found: list[Any], block_size: int, place: Place
) -> None:
    table = file[f"crc/{name}"][:]
    assert zlib.crc32(table.data) == place.crc32
    blocks = [found[start : start + block_size] for start in range(0, len(found), block_size)]
    assert table.tolist() == [zlib.crc32(b"".join(value.tobytes() for value in b)) for b in blocks]


def check_offsets(path: Path, file: h5py.File, name: str, place: Place) -> None:
    """Assert that the bytes at an offset equal the bytes that HDF5 reads."""
    offsets = {"data": place.offset, "crc": place.crc_offset, "index": place.index_offset}
    with path.open("rb") as raw:
        for group, offset in offsets.items():
            if offset is not None:
                whole = file[f"{group}/{name}"][:].tobytes()
                raw.seek(offset)
                assert raw.read(len(whole)) == whole
