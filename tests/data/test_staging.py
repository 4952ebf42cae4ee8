"""Check that a staged data set gives the same verified samples from one copy per node."""

import gc
import logging
import os
import pickle
import resource
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import hpctrain
from hpctrain.core.errors import DataError
from hpctrain.data import staging
from hpctrain.data.node_folder import Site
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.samples import Ragged
from hpctrain.data.staging import StagedOpener, stage
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
    """Return a folder that all ranks can access."""
    return comm.broadcast_object(tmp_path)


@pytest.fixture
def write(comm, folder):
    """Write a data set of three shards, of which the last is short; open it on all ranks."""

    def make(compression=None):
        if comm.rank == 0:
            rng = np.random.default_rng(0)
            arrays = {
                "image": rng.random((N, 50, 7), dtype=np.float32),
                "number": np.arange(N),
                "text": Ragged.of([torch.full((n % 9,), n) for n in range(N)]),
            }
            sizes = {"samples_per_shard": 401, "block_size": 7, "compression": compression}
            write_arrays(folder / "set", arrays, **sizes)
        comm.barrier()
        return ShardedDataset.open(folder / "set", comm)

    return make


def every(dataset, source):
    """Take all samples in random order and compare them."""
    for indices in np.split(np.random.default_rng(1).permutation(N), 5):
        found, wanted = dataset.take(indices), source.take(indices)
        assert found["number"].tolist() == indices.tolist()
        assert torch.equal(found["image"], wanted["image"])
        assert found["text"].values.tolist() == wanted["text"].values.tolist()
        assert found["text"].lengths.tolist() == [n % 9 for n in indices.tolist()]


def shards_in(folder):
    return sorted(path.name for path in folder.rglob("*.h5*"))


def messages_by(comm, caplog):
    """Return the messages of one rank."""
    message = [record.getMessage() for record in caplog.records]
    assert len(message) == (comm.rank == 0)
    return comm.broadcast_object("".join(message))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("compression", [None, "zstd"])
def test_the_copy_is_the_data_set(comm, folder, write, compression):
    source = write(compression)
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


def test_shards_that_do_not_fit_are_not_copied(comm, folder, write, monkeypatch, caplog):
    source = write()
    size = source.manifest.shards[0].num_bytes + 10_000
    room = [Site(folder / "small", 10_000), Site(folder / "node", size), Site(folder, size)]
    for site in room:
        site.folder.mkdir(exist_ok=True)
    monkeypatch.setattr(staging, "sites", lambda *_: room)
    with caplog.at_level(logging.WARNING, "hpctrain"):
        staged = stage(source, comm)
    assert shards_in(folder / "node") == [source.manifest.shards[0].file]
    every(staged, source)
    assert "1 of 3 shards of data set" in messages_by(comm, caplog)
    del room[1:]
    assert stage(source, comm) is source


def test_a_full_disk_takes_what_it_can(comm, folder, write, caplog):
    source = write()
    # Rank 0 copies the first shard, which is too large, and the last one; rank 1 the second.
    limit = source.manifest.shards[2].num_bytes
    with caplog.at_level(logging.WARNING, "hpctrain"), largest_file(limit):
        staged = stage(source, comm, folder / "node")
    assert staged is source
    comm.barrier()  # the last one to leave removes the folder
    assert shards_in(folder / "node") == []
    every(staged, source)
    message = messages_by(comm, caplog)
    assert "0 of 3 shards" in message
    assert "File too large" in message


def test_a_rank_with_a_full_disk_leaves_no_part_of_a_shard(comm, folder, write):
    source = write()
    with largest_file(source.manifest.shards[2].num_bytes if comm.rank == 0 else 1 << 30):
        staged = stage(source, comm, folder / "node")
    assert shards_in(folder / "node") == [source.manifest.shards[1].file]
    every(staged, source)


def cut(file):
    with file.open("r+b") as opened:
        opened.truncate(file.stat().st_size - 5)


def change(file):
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"damaged")


def test_a_shard_that_cannot_be_read_is_an_error_on_every_rank(comm, folder, write, monkeypatch):
    source, check = write(), staging.check_file
    before = resource.getrlimit(resource.RLIMIT_NOFILE)

    def checked(*arguments):
        check(*arguments)
        if comm.rank == 0:  # no descriptor is left to open the shard, which is all right
            os.close(free := os.dup(0))
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))

    monkeypatch.setattr(staging, "check_file", checked)
    try:
        with pytest.raises(DataError, match="not copied to the node: Too many open files"):
            stage(source, comm, folder / "node")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change, r"is damaged, so it is not copied .* crc32 \(samples 401 to 801\)"),
        (cut, "bytes by the manifest"),
        (Path.unlink, "No such file"),
    ],
)
def test_a_damaged_shard_is_an_error_on_every_rank(comm, folder, write, damage, words):
    source = write()
    if comm.rank == 0:
        damage(folder / "set" / source.manifest.shards[1].file)
    comm.barrier()
    with pytest.raises(DataError, match=words):
        stage(source, comm, folder / "node")
    comm.barrier()
    assert not list((folder / "node").iterdir())


def test_a_folder_that_one_rank_cannot_use_is_an_error_on_every_rank(
    comm, folder, write, monkeypatch
):
    source = write()
    if comm.rank == 0:
        (folder / "file").touch()
    comm.barrier()
    with pytest.raises(DataError, match=r"cannot copy data set .* to this node"):
        stage(source, comm, folder / "file" / "node")
    if comm.rank == 1:
        monkeypatch.setattr(staging.NodeFolder, "join", lambda _: (folder / "file/x").mkdir())
    with pytest.raises(DataError, match="choose a folder that every rank of the node can read"):
        stage(source, comm, folder / "node")
    comm.barrier()
    assert not list((folder / "node").iterdir())


def test_a_long_copy_reports_its_progress(comm, folder, write, caplog, monkeypatch):
    source = write()
    monkeypatch.setattr(staging, "FIRST_S", 0.0)
    with caplog.at_level(logging.WARNING, "hpctrain"):
        stage(source, comm, folder / "node")
    assert "this rank has copied" in messages_by(comm, caplog)


def test_a_copy_that_cannot_be_read_is_replaced_by_the_data_set(comm, folder, write):
    source = write()
    staged = stage(source, comm, folder / "node")
    (path,) = (folder / "node").iterdir()
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
    # Four copies would be 256 MiB; a quarter of the set is left for other allocations.
    assert grown < 1.25 * samples_bytes


def pss_bytes():
    """Return the memory of this process; shared pages are divided by the number of processes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
