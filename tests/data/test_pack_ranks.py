"""Check that several ranks pack the same data set as one rank, and all raise an error of one."""

import tarfile
from io import BytesIO
from pathlib import Path

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpctrain.core.errors import DataError
from hpctrain.data.packing.pack import PackConfig, pack
from tests.data.plain import read_whole

SIZES = pytest.mark.ranks(2, 3)
N = 101

CODE = """
from pathlib import Path

class Items:
    def __len__(self): return 101
    def __getitem__(self, index):
        if index == 90 and Path("fail").exists():
            raise RuntimeError("item 90")
        return {"x": index}

def rows():
    return ({"x": index} for index in range(101))
"""


@pytest.fixture
def folder(comm, tmp_path, monkeypatch):
    """Provide a common current directory that all ranks can access."""
    shared = Path(comm.broadcast_object(str(tmp_path)))
    if comm.rank == 0:
        write(shared)
    comm.barrier()
    monkeypatch.chdir(shared)
    monkeypatch.syspath_prepend(shared)
    yield shared
    comm.barrier()


def write(shared):
    (shared / "many_rows.py").write_text(CODE)
    with h5py.File(shared / "a.h5", "w") as file:
        file["x"] = np.random.default_rng(0).random((N, 3))
        file["n"] = np.arange(N)
    table = pa.table({"n": pa.array(range(N)), "t": pa.array(["a" * i for i in range(N)])})
    pq.write_table(table, shared / "t.parquet", row_group_size=20)
    (shared / "tars").mkdir()
    for part in range(2):
        with tarfile.open(shared / f"tars/{part}.tar", "w") as archive:
            for index in range(1 + 20 * part):
                info = tarfile.TarInfo(f"{index}.cls")
                info.size = 2
                archive.addfile(info, BytesIO(b"%2d" % index))


@SIZES
@pytest.mark.parametrize(
    ("source", "config"),
    [
        ("a.h5", {"shuffle": 4, "samples_per_shard": 9}),
        ("t.parquet", {"samples_per_shard": 9}),
        ("t.parquet", {"samples_per_shard": 9, "shuffle": 4, "fields": {"n": "n:f4"}}),
        ("many_rows:rows", {"shuffle": 4, "fields": {"x": "x:f4"}}),
        ("tars", {}),
        ("many_rows:Items", {}),
        ("many_rows:rows", {}),
    ],
)
def test_many_ranks_pack_the_same_as_one_rank(comm, folder, source, config):
    done = pack(source, "many", PackConfig(**config), comm=comm)
    assert [note for note in done.notes if "ranks pack" in note] == (
        [f"1 of {comm.size} ranks packs, because the source has 1 part"]
        * (source[-4:] == "rows" and "shuffle" not in config)
        or ["2 of 3 ranks pack, because the source has 2 parts"]
        * (source == "tars" and comm.size > 2)
    )
    if comm.rank == 0:
        pack(source, "one", PackConfig(**config))
        many, one = read_whole(folder / "many"), read_whole(folder / "one")
        assert many.keys() == one.keys()
        for name in one:
            assert len(many[name]) == len(one[name])
            assert all(map(np.array_equal, many[name], one[name]))
    manifest = comm.allgather_object(done.manifest)
    assert all(other == done.manifest for other in manifest)


@SIZES
def test_rank_that_fails_stops_all_ranks_which_can_resume(comm, folder):
    if comm.rank == 0:
        (folder / "fail").touch()
    comm.barrier()
    config = PackConfig(samples_per_shard=5)
    own = comm.rank == comm.size - 1  # this rank has item 90
    with pytest.raises(RuntimeError if own else DataError, match="item 90"):
        pack("many_rows:Items", "set", config, comm=comm)
    comm.barrier()
    if comm.rank == 0:
        assert not (folder / "set/manifest.json").exists()
        (folder / "fail").unlink()
    comm.barrier()

    class Watcher:
        done = 0

        def __call__(self, _, done):
            self.done = done
            return id

    watcher = Watcher()
    pack("many_rows:Items", "set", config, comm=comm, start=watcher)
    assert (watcher.done > 0) == (not own)
    if comm.rank == 0:
        assert read_whole(folder / "set")["x"] == list(range(N))


@SIZES
@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize("source", ["nothing.npz", "many_rows:nothing", "tars/0.tar"])
def test_error_of_the_source_raises_on_all_ranks(comm, source):
    config = PackConfig(fields={"x": "png"} if source.startswith("tars") else {})
    messages = []
    try:
        pack(source, "set", config, comm=comm)
    except DataError as error:
        messages = comm.allgather_object(str(error))
    assert len(messages) == comm.size
    assert len(set(messages)) == 1
