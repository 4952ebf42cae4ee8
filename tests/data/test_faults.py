"""Check damaged, lost or changed files: exact samples, or an error that names the lost samples."""

import ctypes
import os
import pickle
import random
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pytest

from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data.format.dataset_manifest import Field, Manifest
from hpctrain.data.io.shardfile import OpenShard, ShardFile
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.writer import ShardWriter, write_arrays
from tests.data.conftest import numbered
from tests.data.mixed_set import IN_MEMORY, flip, mixed, write_mixed

_CLONE_NEWNS = 0x00020000
_NOBODY = 65534
_MS_RDONLY, _MS_REMOUNT, _MS_BIND = 1, 32, 4096
_MS_REC, _MS_PRIVATE = 1 << 14, 1 << 18


@pytest.fixture(params=["map", "read"])
def io(request):
    """Parametrize over the methods of reading uncompressed bytes."""
    return request.param


def file_of(directory, index=0):
    shard = Manifest.read(directory).shards[index]
    return directory / shard.file, shard


def numbers(dataset, indices):
    return dataset.take(indices)["number"].tolist()


def test_damaged_block_is_reported_with_its_samples(directory, io):
    path, shard = file_of(directory, 1)
    flip(path, shard.places["number"].offset + 8 * 30)
    dataset = ShardedDataset(directory, io=io)
    words = rf"{shard.file} is damaged: block 4 of field number .*; samples 68 to 74 of"
    for _ in range(2):
        assert numbers(dataset, np.arange(0, 68)) == list(range(68))
        with pytest.raises(CorruptError, match=words) as output:
            dataset.take([3, 74])
        assert (output.value.start, output.value.stop) == (68, 75)
        assert pickle.loads(pickle.dumps(output.value)).stop == 75
    assert numbers(dataset, [75, 99]) == [75, 99]


def test_a_damaged_chunk_is_named_with_the_samples_of_a_block(tmp_path):
    write_mixed(tmp_path, compression="zstd")
    path, _ = file_of(tmp_path, 1)
    with h5py.File(path) as file:
        middle = file["data/image"].id.get_chunk_info(0).byte_offset + 100
    flip(path, middle)
    dataset = ShardedDataset(tmp_path)
    with pytest.raises(CorruptError, match="block 2 of field image cannot be read") as output:
        dataset.take([54])
    assert (output.value.start, output.value.stop) == (54, 61)
    assert numbers(dataset, [0, 99]) == [0, 99]


def test_a_damaged_block_never_counts_as_checked(directory, io):
    """At no time may another thread read samples of the block."""
    path, shard = file_of(directory, 1)
    flip(path, shard.places["number"].offset + 8 * 30)
    seen = []

    class Watched(np.ndarray):
        def __setitem__(self, key, value):
            super().__setitem__(key, value)
            seen.append(bool(np.asarray(self)[30 // 7]))

    manifest = Manifest.read(directory)
    opened = OpenShard(directory, manifest, 1, io=io)
    for again in (False, True):
        opened.file.checked = opened.file.checked.view(Watched)
        with pytest.raises(CorruptError):
            opened.check_blocks(np.arange(40), again=again)
    assert seen
    assert not any(seen)


def test_verify_selects_when_a_block_is_checked(directory, io):
    path, shard = file_of(directory)
    first, always = (ShardedDataset(directory, verify=v, io=io) for v in ("first", "always"))
    for dataset in (first, always):
        dataset.take([0])
    status = path.stat()
    flip(path, shard.places["image"].offset)
    # Otherwise the change would be detected, and the block checked again.
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    assert numbers(first, [0]) == [0]
    if io == "map":  # otherwise the values of such small samples would be cached, and unchanged
        with pytest.raises(CorruptError, match="damaged"):
            always.take([0])
    assert np.array_equal(always.take([7])["image"][0], numbered(100)["image"][7])
    assert numbers(ShardedDataset(directory, verify="off", io=io), [0]) == [0]


def test_a_file_changed_while_open_is_checked_again(directory, io):
    path, shard = file_of(directory)
    dataset = ShardedDataset(directory, io=io)
    dataset.take(np.arange(100))
    flip(path, shard.places["image"].offset)
    os.utime(path)
    with pytest.raises(CorruptError, match="block 0 of field image"):
        take_three_times(dataset)
    flip(path, shard.places["image"].offset)
    os.utime(path)
    for _ in range(3):
        assert numbers(dataset, [0]) == [0]


def test_a_read_that_went_wrong_is_done_again(directory, io, monkeypatch):
    real, failures = ShardFile.problem, []

    def problem(self, block):
        if block == 2 and not failures:
            failures.append(block)
            return "read wrong"
        return real(self, block)

    monkeypatch.setattr(ShardFile, "problem", problem)
    monkeypatch.setattr(ShardFile, "wrong_blocks", lambda _, blocks: [b for b in blocks if b == 2])
    assert numbers(ShardedDataset(directory, io=io), range(100)) == list(range(100))
    assert failures == [2]


def test_a_good_copy_put_in_place_of_a_damaged_file_is_taken(directory, io):
    path, shard = file_of(directory)
    good = Path(shutil.copy(path, directory / "good"))
    flip(path, shard.places["number"].offset)
    dataset = ShardedDataset(directory, io=io)
    with pytest.raises(CorruptError):
        dataset.take([0])
    good.rename(path)
    assert numbers(dataset, [0]) == [0]


@pytest.mark.parametrize("num_bytes", [0, 100, 12_000, -1, None])
def test_a_shard_that_is_truncated_or_missing_is_named_when_the_set_is_opened(
    directory, num_bytes
):
    path, shard = file_of(directory, 1)
    words = rf"{path.name}: the file must have {shard.num_bytes} bytes"
    if num_bytes is None:
        path.unlink()
        words = rf"cannot read shard .*{path.name}: No such file"
    else:
        os.truncate(path, num_bytes % shard.num_bytes)
    with pytest.raises(CorruptError, match=words) as output:
        ShardedDataset(directory)
    assert (output.value.start, output.value.stop) == (40, 80)


@pytest.mark.parametrize("verify", ["first", "always", "off"])
@pytest.mark.parametrize("is_open", [False, True])
def test_a_shard_truncated_later_is_named_when_it_is_read(directory, io, verify, is_open):
    dataset = ShardedDataset(directory, io=io, verify=verify)
    if is_open:
        dataset.take(range(100))
    path, shard = file_of(directory, 1)
    os.truncate(path, 5000)
    assert numbers(dataset, [0, 99]) == [0, 99]
    with pytest.raises(CorruptError, match=rf"{path.name}.* {shard.num_bytes} bytes") as output:
        dataset.take([40])
    assert (output.value.start, output.value.stop) == (40, 80)


def test_a_shard_removed_while_open_is_still_read(directory, io):
    dataset = ShardedDataset(directory, io=io)
    dataset.take([40])
    path, _ = file_of(directory, 1)
    path.unlink()
    assert numbers(dataset, range(100)) == list(range(100))


def take_three_times(dataset):
    """Take sample 0 for each file; where files form one array, one is checked each time."""
    for _ in dataset.manifest.shards:
        dataset.take([0])


@pytest.mark.parametrize("is_open", [False, True])
def test_a_shard_of_another_data_set_of_the_same_size_is_found(directory, tmp_path, io, is_open):
    other = {name: array[::-1] for name, array in numbered(100).items()}
    write_arrays(tmp_path / "other", other, samples_per_shard=40, block_size=7)
    theirs, (path, shard) = file_of(tmp_path / "other")[0], file_of(directory)
    assert theirs.stat().st_size == shard.num_bytes
    dataset = ShardedDataset(directory, io=io)
    if is_open:
        dataset.take(range(100))
    path.write_bytes(theirs.read_bytes())
    with pytest.raises(
        CorruptError, match=f"{path.name}: .* the file does not belong to the manifest"
    ):
        take_three_times(dataset)


def test_a_filtered_shard_of_another_program_is_read(directory):
    manifest = Manifest.read(directory)
    path, shard = file_of(directory)
    with h5py.File(path, "r+") as file:
        for name in manifest.fields:
            values = file[f"data/{name}"][:]
            del file[f"data/{name}"]
            file.create_dataset(f"data/{name}", data=values, compression="gzip", chunks=True)
    places = {
        name: replace(place, offset=None, crc_offset=None) for name, place in shard.places.items()
    }
    first = replace(shard, num_bytes=path.stat().st_size, places=places)
    replace(manifest, shards=(first, *manifest.shards[1:])).write(directory)
    assert numbers(ShardedDataset(directory), range(100)) == list(range(100))


@pytest.fixture
def read_only(directory):
    """Provide the data set on a read-only mount that only this thread can see."""
    libc = ctypes.CDLL(None, use_errno=True)
    before, folder = os.open("/proc/thread-self/ns/mnt", os.O_RDONLY), Path.cwd()
    assert libc.unshare(_CLONE_NEWNS) == 0
    try:
        here = os.fsencode(directory)
        assert libc.mount(b"none", b"/", None, _MS_REC | _MS_PRIVATE, None) == 0
        assert libc.mount(here, here, None, _MS_BIND, None) == 0
        assert libc.mount(b"none", here, None, _MS_REMOUNT | _MS_BIND | _MS_RDONLY, None) == 0
        yield directory
    finally:
        assert libc.setns(before, _CLONE_NEWNS) == 0
        os.close(before)
        os.chdir(folder)  # unshare changed it to the root


@pytest.mark.requires("root")
def test_a_mount_that_is_read_only_is_read(read_only, io):
    with pytest.raises(OSError, match="Read-only"):
        (read_only / "new").touch()
    for verify in ("first", "always"):
        dataset = ShardedDataset(read_only, io=io, verify=verify)
        assert numbers(dataset, range(100)) == list(range(100))


@pytest.mark.requires("root")
def test_an_unreadable_file_is_reported(directory):
    path, _ = file_of(directory)
    dataset = ShardedDataset(directory)
    path.chmod(0o600)
    os.seteuid(_NOBODY)
    try:
        with pytest.raises(DataError, match=f"cannot read shard .*{path.name}: Permission denied"):
            dataset.take([0])
    finally:
        os.seteuid(0)
    assert numbers(dataset, [0]) == [0]


FLIPS_EACH = 100


@pytest.fixture(scope="module", params=[None, "zstd"])
def in_memory(request):
    """Provide a data set in memory with fixed and ragged fields, plain or all compressed."""
    fields = {
        "image": Field.of((3, 2), "f4"),
        "number": Field.of((), "i8"),
        "text": Field.of((), "i4", ragged=True),
    }
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder:
        with ShardWriter(
            Path(folder), fields, samples_per_shard=40, block_size=7, compression=request.param
        ) as writer:
            writer.append({name: mixed(100)[name] for name in fields})
        yield Path(folder)


def data_bytes(path, shard, name, manifest):
    """Return the position of every byte of a field in its file."""
    place, field = shard.places[name], manifest.fields[name]
    if place.offset is not None:
        num_rows = place.num_rows if field.ragged else shard.num_samples
        return range(place.offset, place.offset + num_rows * field.sample_bytes)
    with h5py.File(path) as file:
        data = file[f"data/{name}"].id
        chunks = [data.get_chunk_info(number) for number in range(data.get_num_chunks())]
    return [at for c in chunks for at in range(c.byte_offset, c.byte_offset + c.size)]


def is_refused(dataset, samples, path):
    """Return True if samples cannot be read, and the error names a range of them and the file."""
    try:
        dataset.take(samples)
    except CorruptError as error:
        return (
            path.name in str(error) and samples[0] <= error.start < error.stop <= samples[-1] + 1
        )
    return False


@pytest.mark.parametrize("io", ["map", "read"])
def test_every_flipped_bit_of_the_data_is_found(in_memory, io):
    manifest = Manifest.read(in_memory)
    dice = random.Random(0)
    places, first = [], 0
    for shard in manifest.shards:
        samples = np.arange(first, first + shard.num_samples)
        path = in_memory / shard.file
        for name in manifest.fields:
            places += [(path, samples, at) for at in data_bytes(path, shard, name, manifest)]
        first += shard.num_samples
    for path, samples, at in dice.sample(places, FLIPS_EACH):
        bit = dice.randrange(8)
        flip(path, at, bit)
        assert is_refused(ShardedDataset(in_memory, io=io, manifest=manifest), samples, path)
        flip(path, at, bit)
    assert len(ShardedDataset(in_memory, io=io).take(np.arange(100))["number"]) == 100


def test_a_flipped_bit_anywhere_is_found_or_harmless(in_memory):
    manifest, whole = Manifest.read(in_memory), mixed(100)
    dice = random.Random(1)
    for _ in range(100):
        shard = dice.choice(manifest.shards)
        at, bit = dice.randrange(shard.num_bytes), dice.randrange(8)
        flip(in_memory / shard.file, at, bit)
        try:
            # Any other error than the one intended for users fails the test.
            read = ShardedDataset(in_memory, manifest=manifest).take(np.arange(100))
        except DataError:
            pass
        else:
            assert np.array_equal(read["image"], whole["image"])
            assert np.array_equal(read["number"], whole["number"])
            assert np.array_equal(read["text"].values, np.concatenate(whole["text"]))
        flip(in_memory / shard.file, at, bit)
