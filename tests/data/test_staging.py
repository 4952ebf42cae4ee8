"""A staged data set gives the same samples, checked, from one copy per node."""

import gc
import logging
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import hpctrain
from hpctrain.core.errors import CorruptError, DataError
from hpctrain.data import staging
from hpctrain.data.io.staging import node_copy as stage_copy
from hpctrain.data.io.staging.place import Site
from hpctrain.data.io.staging.staged_shard import StagedOpener
from hpctrain.data.ragged import Ragged
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.staging import stage
from hpctrain.data.writer import write_arrays
from hpctrain.runtime.world import current
from tests.full_disk import largest_file

pytestmark = pytest.mark.ranks(2)

N = 1000


@pytest.fixture
def comm():
    hpctrain.init()
    yield current().comm
    hpctrain.shutdown()


@pytest.fixture
def folder(comm, tmp_path):
    """Give a folder that all ranks see."""
    return comm.broadcast_object(tmp_path)


@pytest.fixture
def write(comm, folder):
    """Write a data set in three shards, the last one short; return it, opened by all ranks."""

    def make(**options):
        if comm.rank == 0:
            rng = np.random.default_rng(0)
            arrays = {
                "image": rng.random((N, 50, 7), dtype=np.float32),
                "number": np.arange(N),
                "text": Ragged.of([torch.full((n % 9,), n) for n in range(N)]),
            }
            sizes = {"samples_per_shard": 401, "block_size": 7}
            write_arrays(folder / "set", arrays, **(sizes | options))
        comm.barrier()
        return ShardedDataset.open(folder / "set", comm)

    return make


@pytest.fixture
def room(monkeypatch, folder):
    """Let the node have so much room and no more."""

    def give(num_bytes):
        (folder / "node").mkdir(exist_ok=True)
        monkeypatch.setattr(staging, "sites", lambda *_: [Site(folder / "node", num_bytes)])

    return give


def assert_same(found, indices):
    assert found["number"].tolist() == indices.tolist()
    assert found["text"].values.tolist() == [n for n in indices.tolist() for _ in range(n % 9)]
    assert found["text"].lengths.tolist() == [n % 9 for n in indices.tolist()]


def every(dataset, source):
    """Take all samples in random order and compare them."""
    for indices in np.split(np.random.default_rng(1).permutation(N), 5):
        found = dataset.take(indices)
        assert_same(found, indices)
        assert torch.equal(found["image"], source.take(indices)["image"])


def shards_in(folder):
    return sorted(path.name for path in folder.rglob("*.h5*"))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_copy_is_the_data_set(comm, folder, write, compression):
    source = write(compression=compression)
    staged = stage(source, comm, folder / "node")
    files = [shard.file for shard in source.manifest.shards]
    assert shards_in(folder / "node") == sorted(files)
    every(staged, source)
    comm.barrier()
    if comm.rank == 0:
        shutil.rmtree(folder / "set")
    comm.barrier()
    every(pickle.loads(pickle.dumps(staged)), staged)
    comm.barrier()
    del staged
    gc.collect()
    comm.barrier()
    assert shards_in(folder / "node") == []


def test_what_does_not_fit_is_read_from_the_data_set(comm, folder, write, room, caplog):
    source = write()
    room(source.manifest.shards[0].num_bytes + 10_000)
    with caplog.at_level(logging.WARNING, "hpctrain"):
        staged = stage(source, comm)
    assert shards_in(folder / "node") == [source.manifest.shards[0].file]
    every(staged, source)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (comm.rank == 0)
    assert all("from 1 of 3 shards" in text for text in said)
    room(10)
    assert stage(source, comm) is source


@pytest.mark.ranks(1, 2, 3)
def test_the_chosen_blocks_are_copied_and_no_others(comm, folder, write, room):
    source = write()
    blocks = np.random.default_rng(2).permutation(-(-N // 7))[:30]
    full_bytes = sum(shard.num_bytes for shard in source.manifest.shards)
    room(full_bytes // 2)
    staged = stage(source, comm, blocks=blocks)
    copies = (folder / "node").rglob("*.h5")
    assert sum(path.stat().st_blocks * 512 for path in copies) < full_bytes // 2
    every(staged, source)
    comm.barrier()
    if comm.rank == 0:
        (folder / "set").rename(folder / "away")
    comm.barrier()
    inside = (blocks[:, None] * 7 + np.arange(7)).ravel()
    inside = np.random.default_rng(3).permutation(inside[inside < N])
    outside = np.setdiff1d(np.arange(N), inside)
    again = pickle.loads(pickle.dumps(staged))
    assert_same(again.take(inside), inside)
    with pytest.raises(CorruptError, match="cannot read shard"):
        again.take(outside)


def test_blocks_beyond_the_room_are_read_from_the_data_set(comm, folder, write, room):
    source = write()
    room(source.manifest.shards[0].num_bytes // 2)
    staged = stage(source, comm, blocks=np.arange(0, -(-N // 7), 2))
    assert len(shards_in(folder / "node")) == 1
    every(staged, source)


def test_compressed_shards_are_copied_as_a_whole(comm, folder, write, room):
    source = write(compression="zstd")
    room(source.manifest.shards[0].num_bytes + 100)
    staged = stage(source, comm, blocks=[0])
    assert shards_in(folder / "node") == [source.manifest.shards[0].file]
    every(staged, source)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("blocks", [None, list(range(0, N // 7, 4))])
def test_a_damaged_shard_is_an_error_on_every_rank(comm, folder, write, room, blocks):
    source = write()
    total_bytes = sum(shard.num_bytes for shard in source.manifest.shards)
    room(total_bytes if blocks is None else int(0.9 * total_bytes))
    if comm.rank == 0:
        shard = source.manifest.shards[1]
        with (folder / "set" / shard.file).open("r+b") as file:
            # Sample 401 + 27 is in block 61 of the data set, and in block 3 of the shard.
            file.seek(shard.places["image"].offset + 27 * 50 * 7 * 4)
            file.write(b"damaged")
    comm.barrier()
    wanted = [*blocks, 61] if blocks else None
    with pytest.raises(CorruptError, match="is damaged, so it is not copied") as caught:
        stage(source, comm, blocks=wanted)
    assert (caught.value.start, caught.value.stop) == ((422, 429) if blocks else (401, 802))
    comm.barrier()
    assert not list((folder / "node").iterdir())


def test_a_truncated_or_missing_shard_is_an_error_on_every_rank(comm, folder, write):
    source = write()
    file = folder / "set" / source.manifest.shards[2].file
    if comm.rank == 0:
        with file.open("r+b") as opened:
            opened.truncate(file.stat().st_size - 5)
    comm.barrier()
    with pytest.raises(CorruptError, match="bytes by its manifest"):
        stage(source, comm, folder / "node")
    comm.barrier()
    if comm.rank == 0:
        file.unlink()
    comm.barrier()
    with pytest.raises(CorruptError, match="No such file"):
        stage(source, comm, folder / "node")


def test_a_full_disk_takes_what_it_can(comm, folder, write, caplog):
    source = write()
    limit = source.manifest.shards[2].num_bytes
    with caplog.at_level(logging.WARNING, "hpctrain"), largest_file(limit):
        staged = stage(source, comm, folder / "node")
    # The first shard does not fit, and nobody tries on.
    assert staged is source
    assert shards_in(folder / "node") == []
    every(staged, source)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (comm.rank == 0)
    assert all("took 0 of 3 shards" in text and "File too large" in text for text in said)


def test_a_folder_that_cannot_be_made_is_an_error_on_every_rank(comm, folder, write):
    source = write()
    if comm.rank == 0:
        (folder / "file").touch()
    comm.barrier()
    with pytest.raises(DataError, match=r"cannot copy data set .* to this node"):
        stage(source, comm, folder / "file" / "node")


def test_a_long_copy_tells_how_far_it_is(comm, folder, write, caplog, monkeypatch):
    source = write()
    monkeypatch.setattr(stage_copy, "FIRST_S", 0.0)
    with caplog.at_level(logging.WARNING, "hpctrain"):
        stage(source, comm, folder / "node")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == (comm.rank == 0)
    assert all("this rank has copied" in text for text in said)


def test_a_copy_that_cannot_be_read_is_replaced_by_the_data_set(comm, folder, write):
    source = write()
    staged = stage(source, comm, folder / "node")
    (path,) = (path for path in (folder / "node").iterdir())
    comm.barrier()
    if comm.rank == 0:
        (path / source.manifest.shards[0].file).unlink()
    comm.barrier()
    every(staged, source)


@pytest.mark.ranks(4)
def test_the_ranks_of_a_node_hold_one_copy(comm, folder):
    samples_bytes = 64 << 20
    if comm.rank == 0:
        arrays = {"x": np.ones((samples_bytes // 65536, 65536), np.uint8)}
        write_arrays(folder / "set", arrays, samples_per_shard=300)
    comm.barrier()
    dataset = ShardedDataset.open(folder / "set", comm)
    staged = stage(dataset, comm, "/dev/shm")
    staged.take(np.arange(8))
    before = pss_bytes()
    for start in range(0, len(staged), 8):
        staged.take(np.arange(start, start + 8))
    comm.barrier()
    grown = sum(comm.allgather_object(pss_bytes() - before))
    comm.barrier()
    assert isinstance(staged._opener, StagedOpener)
    # Four copies would be 256 MiB; a quarter of the set is left for what else happens.
    assert grown < 1.25 * samples_bytes


def pss_bytes():
    """Memory of this process, each page divided by the number of those who share it."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
