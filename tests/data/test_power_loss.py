"""A manifest names shards that are on disk, and a journal what is worth going on with."""

import json
import shutil

import pytest

from hpctrain.core.atomic import PART
from hpctrain.data.format.layout import LOCK, MANIFEST
from hpctrain.data.tools.repair import repair
from hpctrain.data.writer import ShardWriter
from tests.data.mixed_set import shard, write_mixed

FIELDS = {"x": ((), "i8"), "words": ((), "i8", True)}


def write(folder, comm, key):
    """Write shards that are full, and one on each rank that is not."""
    with ShardWriter(folder, FIELDS, samples_per_shard=3, comm=comm, resume_key=key) as writer:
        for _ in range(2):
            writer.append({"x": [comm.rank] * 4, "words": [[1], [], [2, 3], [4]]})


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("key", [None, "key"])
def test_a_data_set_is_on_disk_when_its_manifest_is_there(disk, comm, folder, key):
    def watch(target):
        if target.name == MANIFEST:
            disk.faults.extend(disk.lost(MANIFEST, LOCK, below=folder))
        if target.name.endswith(".journal"):
            told = json.loads(target.with_name(target.name + PART).read_text())
            for name in (record["file"] for record in told["shards"]):
                if disk.kept(folder / name) != (folder / name).read_bytes():
                    disk.faults.append(f"{target} names {name}")

    disk.watchers.append(watch)
    for _ in range(2):  # a new one, then in its place
        write(folder, comm, key)
        assert not disk.lost()
        comm.barrier()
    assert not list(folder.glob("*.journal"))


def test_a_repaired_shard_is_on_disk(tmp_path, disk):
    write_mixed(tmp_path / "set")
    shutil.copytree(tmp_path / "set", tmp_path / "copy")
    shard(tmp_path / "set", 0)[0].unlink()
    assert repair(tmp_path / "set", tmp_path / "copy").report.is_whole
    assert not disk.lost("copy")
