"""A shard whose values lie in another file is damaged, whatever that file holds."""

from dataclasses import replace

import h5py
import numpy as np
import pytest

from hpctrain.core.atomic import crc32_of
from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.tools.rewriting import Shape, reshard
from hpctrain.data.tools.verify import verify
from hpctrain.data.writer import write_arrays

SECRET = np.arange(30.0)


def by_link(file, other):
    file["data/x"] = h5py.ExternalLink(other, "/x")


def by_soft_link(file, other):
    file["elsewhere"] = h5py.ExternalLink(other, "/")
    file["data/x"] = h5py.SoftLink("/elsewhere/x")


def by_storage(file, other):
    with h5py.File(other) as there:
        offset = there["x"].id.get_offset()
    file.create_dataset("data/x", (30,), "<f8", external=[(other, offset, SECRET.nbytes)])


def by_virtual_source(file, other):
    layout = h5py.VirtualLayout((30,), "<f8")
    layout[:] = h5py.VirtualSource(other, "x", (30,))
    file.create_virtual_dataset("data/x", layout)


WAYS = [by_link, by_soft_link, by_storage, by_virtual_source]


@pytest.fixture
def other(tmp_path):
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = SECRET
    return str(tmp_path / "other.h5")


@pytest.fixture
def hostile(tmp_path, other, request):
    """Give a set whose manifest agrees with its shard, but for where the values lie."""
    directory = tmp_path / "set"
    manifest = write_arrays(directory, {"x": SECRET}, samples_per_shard=30)
    (shard,) = manifest.shards
    path = directory / shard.file
    with h5py.File(path, "r+") as file:
        del file["data/x"]
        request.param(file, other)
    place = replace(shard.places["x"], offset=None)
    size, crc = path.stat().st_size, crc32_of(path)
    changed = replace(shard, num_bytes=size, crc32=crc, places={"x": place})
    replace(manifest, shards=(changed,)).write(directory)
    return directory


@pytest.mark.parametrize("hostile", WAYS, indirect=True)
def test_it_is_not_read(hostile):
    with pytest.raises(CorruptError, match="values lie in the file that names them"):
        ShardedDataset(hostile).take([0])


@pytest.mark.parametrize("hostile", WAYS, indirect=True)
def test_it_is_not_whole_and_no_copy_takes_it(hostile, tmp_path):
    report = verify(hostile)
    assert report.num_lost == 30
    with pytest.raises(DataError, match="cannot be read: values lie in"):
        reshard(hostile, tmp_path / "copy", Shape())
