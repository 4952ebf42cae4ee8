"""Check that old data sets stay readable, also by h5dump; no data of other files are read.

``golden/plain`` was written before ragged and compressed fields existed, ``golden/kinds``
afterwards, ``golden/stamped`` by version 1.0, and ``golden/split.npz`` by its ``hpctrain data
split``; none must be rewritten.
"""

import hashlib
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch

from hpctrain.core.atomic import crc32_of
from hpctrain.core.errors import CorruptError, DataError
from hpctrain.core.formats import stamp
from hpctrain.data.data_split import Split
from hpctrain.data.format.dataset_manifest import VERSION, Manifest
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.samples import Ragged
from hpctrain.data.tools.rewriting import Shape, reshard
from hpctrain.data.tools.verify import verify
from hpctrain.data.writer import write_arrays
from tests.data.plain import read_whole
from tests.processes import ended

GOLDEN = Path(__file__).parent / "golden"
STAMPED, SPLIT = GOLDEN / "stamped/manifest.json", GOLDEN / "split.npz"
NUMBERS = np.arange(20)
PLAIN = {
    "image": (NUMBERS[:, None, None] * 6 + np.arange(6).reshape(3, 2)).astype("f4"),
    "number": NUMBERS,
    "flag": NUMBERS % 3 == 0,
    "half": (NUMBERS / 4).astype("f2"),
    "bytes": (NUMBERS[:, None] * 7 % 251 * np.array([1, 2, 3]) % 256).astype("u1"),
}
KINDS = {
    "text": [np.arange(n % 4) + n for n in NUMBERS],
    "boxes": [np.full((n % 3, 4), n / 2) for n in NUMBERS],
    "packed": [np.full(5, n) for n in NUMBERS],
    "packed_text": [np.full(n % 5, n) for n in NUMBERS],
}


def test_golden_data_has_the_current_version():
    assert VERSION == 1
    assert {Manifest.read(GOLDEN / name).block_size for name in ("plain", "kinds")} == {8}


def test_a_set_of_version_1_0_is_read_and_its_manifest_would_be_written_unchanged(tmp_path):
    manifest = Manifest.read(GOLDEN / "stamped")
    manifest.write(tmp_path)
    assert (tmp_path / "manifest.json").read_bytes() == STAMPED.read_bytes()
    read = ShardedDataset(GOLDEN / "stamped", verify="always").take(range(8))
    assert np.array_equal(read["y"], read["x"][:, 0] > 0)


def test_a_split_of_version_1_0_is_read():
    assert hashlib.sha256(SPLIT.read_bytes()).hexdigest()[:16] == "018634fcac5d574f"
    split = Split.read(SPLIT)
    split.check(ShardedDataset(GOLDEN / "stamped"))
    assert split.parts.tolist() == [1, 1, 0, 0, 0, 1, 1, 0]
    assert (split.num_parts, split.about) == (2, "alpha=1.0 seed=0 label=y")


def test_a_split_without_a_version_is_read_and_a_newer_one_is_refused(tmp_path):
    with np.load(SPLIT) as file:
        content = {**file}
    np.savez(tmp_path / "newer.npz", **content | stamp(2, "1.7"))
    with pytest.raises(DataError, match="must be at most 1, got 2; install hpctrain 1"):
        Split.read(tmp_path / "newer.npz")
    np.savez(
        tmp_path / "older.npz", **{n: content[n] for n in content.keys() - stamp(1, "").keys()}
    )
    assert np.array_equal(Split.read(tmp_path / "older.npz").parts, content["parts"])


@pytest.mark.parametrize(("name", "wanted"), [("plain", PLAIN), ("kinds", KINDS)])
def test_plain_h5py_finds_the_samples(name, wanted):
    read = read_whole(GOLDEN / name)
    assert read.keys() == wanted.keys()
    for field, samples in wanted.items():
        assert all(map(np.array_equal, read[field], samples))


@pytest.mark.parametrize("verify", ["first", "always", "off"])
def test_the_reader_finds_the_samples(verify):
    indices = NUMBERS[::-3]
    read = ShardedDataset(GOLDEN / "plain", verify=verify).take(indices)
    assert all(np.array_equal(read[name], array[indices]) for name, array in PLAIN.items())
    kinds = ShardedDataset(GOLDEN / "kinds", verify=verify).take(indices)
    assert np.array_equal(kinds["packed"], np.array(KINDS["packed"])[indices])
    for name in ("text", "boxes", "packed_text"):
        assert len(kinds[name]) == len(indices)
        for sample, index in zip(kinds[name], indices, strict=True):
            assert np.array_equal(sample, KINDS[name][index])


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
    """Provide a set whose manifest agrees with its shard, except for the place of values."""
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
def test_values_outside_the_shard_are_neither_read_nor_copied(hostile, tmp_path):
    words = "values must be stored in the file that names them"
    with pytest.raises(CorruptError, match=words):
        ShardedDataset(hostile).take([0])
    assert verify(hostile).num_lost == 30
    with pytest.raises(DataError, match=words):
        reshard(hostile, tmp_path / "copy", Shape())


H5DUMP = pytest.mark.requires("h5dump")


def h5dump(*words):
    done = ended(["h5dump", *words])
    assert done.returncode == 0, done.stderr
    return done.stdout


def arrays(num_samples):
    text = [torch.arange(n % 4) for n in range(num_samples)]
    return {"x": np.arange(3 * num_samples).reshape(-1, 3), "text": Ragged.of(text)}


@H5DUMP
def test_h5dump_reads_values_lengths_checksums_and_attributes(tmp_path):
    (shard,) = write_arrays(tmp_path, arrays(6), samples_per_shard=6, block_size=4).shards
    path = tmp_path / shard.file
    assert "(5,0): 15, 16, 17" in h5dump("-d", "/data/x", path)
    assert "(0): 0, 0, 1, 0, 1, 2, 0" in h5dump("-d", "/data/text", path)
    assert "(0): 0, 0, 1, 3, 6, 6, 7" in h5dump("-d", "/index/text", path)
    assert "H5T_STD_U32LE" in h5dump("-d", "/crc/x", path)
    assert "hpctrain-h5" in h5dump("-a", "/format", path)
    assert "(0): 6" in h5dump("-a", "/n", path)
    assert '"ragged": true' in h5dump("-a", "/fields", path).replace("\\", "")


@H5DUMP
def test_h5dump_opens_a_compressed_shard_of_several_chunks(tmp_path):
    rows = {"x": np.arange(500_000)}
    (shard,) = write_arrays(tmp_path, rows, samples_per_shard=500_000, compression="zstd").shards
    text = h5dump("-H", "-p", tmp_path / shard.file)
    assert "( 500000 ) / ( H5S_UNLIMITED )" in text
    assert "CHECKSUM FLETCHER32" in text
    assert "FILTER_ID 32015" in text
