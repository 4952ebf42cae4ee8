"""Check that packing resumes after a kill, detects kinds of sources, and rejects unknown kinds."""

import errno
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from hpctrain.core.errors import DataError
from hpctrain.data.format import writer_files
from hpctrain.data.format.dataset_manifest import Manifest
from hpctrain.data.packing.kinds import kind_of
from hpctrain.data.packing.pack import PackConfig, pack
from hpctrain.data.tools.verify import verify
from hpctrain.data.writer import write_arrays
from tests.data.plain import read_whole

ROWS = np.arange(100)

# Stops at item 60 until a file "go" exists.
CODE = """
import time
from pathlib import Path

def item(index):
    while index == 60 and not Path("go").exists():
        time.sleep(0.01)
    return {"number": index, "row": list(range(index % 4))}

class Items:
    def __len__(self): return 100
    def __getitem__(self, index): return item(index)
"""

PACK = """
import sys
from hpctrain.data.packing.pack import PackConfig, pack

def start(total, done):
    return lambda num_samples: print(num_samples, flush=True)

config = PackConfig(samples_per_shard=8, ragged=("row",), shuffle=5)
import hpctrain.data.packing.source as source
source.BATCH_SAMPLES = 4
source.NUM_EXAMINED = 10
import hpctrain.data.packing.python as python
python.NUM_EXAMINED = 10
pack(sys.argv[1], "set", config, start=start)
"""


class Watcher:
    done = total = written = 0

    def __call__(self, total, done):
        self.total, self.done = total, done
        return self.advance

    def advance(self, num_samples):
        self.written += num_samples


@pytest.mark.limit(180)
def test_a_concurrent_reshard_is_rejected_and_a_killed_one_resumes_after_the_finished_shards(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("hpctrain.data.packing.python.NUM_EXAMINED", 10)
    monkeypatch.setattr("hpctrain.data.packing.source.NUM_EXAMINED", 10)
    (tmp_path / "slow_items.py").write_text(CODE)
    source, config = (
        "slow_items:Items",
        PackConfig(samples_per_shard=8, ragged=("row",), shuffle=5),
    )
    line = [sys.executable, "-c", PACK, source]
    with subprocess.Popen(line, stdout=subprocess.PIPE, text=True) as process:
        written = 0
        while written < 32:
            written += int(process.stdout.readline())
        for again in (config, replace(config, overwrite=True)):
            with pytest.raises(
                DataError, match=f"one writer at a time, but process {process.pid} "
            ):
                pack(source, "set", again)
        process.kill()
    assert not (tmp_path / "set/manifest.json").exists()
    (tmp_path / "go").touch()
    watcher = Watcher()
    pack(source, "set", config, start=watcher)
    assert watcher.done >= 32
    assert watcher.written == 100 - watcher.done
    assert not verify("set").leftovers
    pack(source, "fresh", config)
    found, fresh = read_whole(tmp_path / "set"), read_whole(tmp_path / "fresh")
    assert np.array_equal(found["number"], fresh["number"])
    assert sorted(found["number"]) == list(range(100))
    assert [len(row) for row in found["row"]] == [number % 4 for number in found["number"]]


def test_a_set_that_appears_while_the_source_is_examined_is_kept(tmp_path):
    np.save(tmp_path / "x.npy", ROWS)

    class Meanwhile:
        """Let another packing complete between the first check and the lock."""

        def __len__(self):
            if not (tmp_path / "set").exists():
                pack(tmp_path / "x.npy", tmp_path / "set")
            return 3

        def __getitem__(self, index):
            return {"x": -1}

    with pytest.raises(DataError, match=r"already contains a data set"):
        pack(Meanwhile(), tmp_path / "set")
    assert read_whole(tmp_path / "set")["x"] == list(range(100))


def test_a_directory_without_locks_is_written_with_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(writer_files.fcntl, "flock", refuse)
    monkeypatch.setattr(writer_files.logger, "propagate", True)
    write_arrays(tmp_path / "set", {"x": ROWS}, samples_per_shard=50)
    assert "has no locks (Function not implemented)" in caplog.text
    assert read_whole(tmp_path / "set")["x"] == list(range(100))


@pytest.mark.parametrize("change", ["none", "source", "option", "object"])
def test_finished_shards_are_kept_for_the_same_source_and_options_only(tmp_path, change):
    source = tmp_path / "x.npy"
    np.save(source, ROWS)

    given = ROWS_OBJECT if change == "object" else source
    config = {"samples_per_shard": 10}
    watcher = Watcher()
    watcher.advance = Mock(side_effect=RuntimeError("stop"))
    with pytest.raises(RuntimeError, match="stop"):
        pack(given, tmp_path / "set", PackConfig(**config), start=watcher)
    if change == "source":
        np.save(source, ROWS[::-1])
    if change == "option":
        config["block_size"] = 5
    watcher = Watcher()
    pack(given, tmp_path / "set", PackConfig(**config), start=watcher)
    assert watcher.done == (100 if change == "none" else 0)
    assert watcher.done + watcher.written == watcher.total == 100


ROWS_OBJECT = [{"x": row} for row in ROWS]


def test_a_data_set_is_replaced_only_with_overwrite(tmp_path):
    np.save(tmp_path / "x.npy", ROWS)
    pack(tmp_path / "x.npy", tmp_path / "set")
    with pytest.raises(DataError, match="replace it with --overwrite"):
        pack(tmp_path / "x.npy", tmp_path / "set")
    np.save(tmp_path / "x.npy", ROWS[:3])
    pack(tmp_path / "x.npy", tmp_path / "set", PackConfig(overwrite=True))
    assert read_whole(tmp_path / "set")["x"] == [0, 1, 2]
    (tmp_path / "set/manifest.json").write_text("damaged")
    with pytest.raises(DataError, match="replace it with --overwrite"):
        pack(tmp_path / "x.npy", tmp_path / "set")
    pack(tmp_path / "x.npy", tmp_path / "set", PackConfig(overwrite=True))
    assert read_whole(tmp_path / "set")["x"] == [0, 1, 2]
    assert len(list((tmp_path / "set").glob("*.h5"))) == 1
    with pytest.raises(DataError, match="is one; to change its"):
        pack(tmp_path / "set", tmp_path / "other")


def test_shards_have_the_given_samples_or_bytes_and_may_be_compressed(tmp_path):
    np.save(tmp_path / "x.npy", np.zeros((100, 10), "f4"))

    def sizes(**config):
        pack(tmp_path / "x.npy", tmp_path / "set", PackConfig(overwrite=True, **config))
        return [shard.num_samples for shard in Manifest.read(tmp_path / "set").shards]

    assert sizes() == [100]
    assert sizes(samples_per_shard=30) == [30, 30, 30, 10]
    assert sizes(shard_bytes=2000) == [48, 48, 4]
    assert sizes(shard_bytes=1, block_size=50) == [50, 50]
    assert sizes(compression="zstd") == [100]
    assert Manifest.read(tmp_path / "set").fields["x"].compression == "zstd"
    pack(tmp_path / "x.npy", tmp_path / "test", PackConfig(split="test"))
    assert Manifest.read(tmp_path / "test").split == "test"


def test_the_kind_follows_from_the_source(tmp_path, monkeypatch):
    for name in ("a.npy", "a.npz", "a.hdf5", "a.tar.gz", "a.tsv", "a.pq", "a.txt"):
        (tmp_path / name).touch()
    kinds = ["arrays", "arrays", "hdf5", "tar", "csv", "parquet", "text"]
    names = ["a.npy", "a.npz", "a.hdf5", "a.tar.gz", "a.tsv", "a.pq", "a.txt"]
    assert [kind_of(str(tmp_path / name)) for name in names] == kinds
    assert kind_of("package.module:function") == "python"
    for name in ("x/1.tar", "y/1/2.png", "y/table.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    assert [kind_of("x"), kind_of("y"), kind_of("*/*.tar")] == ["tar", "folder", "tar"]


def test_a_source_that_changes_under_the_packing_is_an_error(tmp_path):
    for index in range(70):
        Image.new("RGB", (2, 2)).save(tmp_path / f"{index:02}.png")

    def start(*_):
        (tmp_path / "33.png").unlink()
        return len

    with pytest.raises(DataError, match=r"cannot read .*33.png: No such file"):
        pack(tmp_path, tmp_path / "set", start=start)


def test_missing_packages_are_reported(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("tabular", "kinds"):
        monkeypatch.delitem(sys.modules, f"hpctrain.data.packing.{name}", raising=False)
    import_module(
        "hpctrain.data.packing.kinds"
    )  # arrays, images and text need none of these packages
    for name in ("t.pq", "t.csv"):
        (tmp_path / name).touch()
        with pytest.raises(DataError, match=r'pip install "hpctrain\[pack\]"'):
            pack(tmp_path / name, tmp_path / "set")


def test_a_stream_resumes_and_functions_of_one_module_are_distinguished(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("hpctrain.data.packing.source.BATCH_SAMPLES", 4)
    code = "def {}(): return ({{'x': {} + index}} for index in range(30))\n"
    text = code.format("first", 0) + code.format("second", 1000)
    (tmp_path / "two_functions.py").write_text(text)
    config = PackConfig(samples_per_shard=10)
    for name, start, kept in (("first", 0, 10), ("second", 1000, 0)):
        stopped, watcher = Watcher(), Watcher()
        stopped.advance = Mock(side_effect=[None, None, None, RuntimeError("stop")])
        with pytest.raises(RuntimeError, match="stop"):
            pack("two_functions:first", tmp_path / name, config, start=stopped)
        pack(f"two_functions:{name}", tmp_path / name, config, start=watcher)
        assert (watcher.done, watcher.written) == (kept, 30 - kept)
        assert read_whole(tmp_path / name)["x"] == list(range(start, start + 30))
