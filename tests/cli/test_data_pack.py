"""Check ``hpctrain data pack``: options, the report of the result, and errors of one line."""

import math
import re
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

import hpctrain
from hpctrain.cli.main import app
from hpctrain.cli.shared_work import ToolBar
from hpctrain.core.errors import ConfigError, DataError, MismatchError
from hpctrain.data.format.dataset_manifest import Manifest
from hpctrain.runtime import tool_ranks
from hpctrain.runtime.world import current
from tests.data.plain import read_whole


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez(tmp_path / "a.npz", x=np.arange(60.0).reshape(20, 3), y=np.arange(20))
    return lambda *words: CliRunner().invoke(app, ["data", "pack", *words])


def test_pack_reports_the_data_set(run):
    result = run("a.npz", "set")
    assert result.exit_code == 0
    note, message, *_ = result.output.splitlines()
    assert note.endswith("to store float32: --field x=x:f4 --field y=y")
    assert message.startswith("set: 20 samples in 1 shard, ")
    assert [line.split(maxsplit=2) for line in result.output.splitlines()[2:]] == [
        ["x", "f8", "(3)"],
        ["y", "i8", "()"],
    ]


def test_ranks_wait_for_each_other_as_long_as_they_live():
    tool_ranks.join()
    assert current().settings.timeout == math.inf
    hpctrain.shutdown()


def test_options_reach_the_data_set(run, tmp_path):
    words = "--field images=x --split test --samples-per-shard 6 --block-size 3 --shuffle 1"
    assert run("a.npz", "set", *words.split()).exit_code == 0
    manifest = Manifest.read(tmp_path / "set")
    assert (manifest.split, manifest.block_size, len(manifest.shards)) == ("test", 3, 4)
    images = np.array(read_whole(tmp_path / "set")["images"])
    assert sorted(images[:, 0]) == list(range(0, 60, 3))
    assert images[0, 0] != 0 or images[1, 0] != 3
    result = run("a.npz", "set", "--split", "test", "--shard-size", "512B", "--overwrite")
    assert "20 samples in 2 shards" in result.output
    (tmp_path / "t.log").write_text("one\ntwo\n\nthree\n")
    result = run("t.log", "text", "--as", "text", "--compression", "zstd")
    assert re.search(r"text +u1 \(length\)", result.output)
    assert Manifest.read(tmp_path / "text").fields["text"].compression == "zstd"
    assert run("t.log", "windows", "--as", "text", "--length", "4").exit_code == 0
    assert Manifest.read(tmp_path / "windows").fields["text"].shape == (4,)


def test_classes_are_counted(run, tmp_path):
    for name in ("a", "b"):
        (tmp_path / "root" / name).mkdir(parents=True)
        np.save(tmp_path / "root" / name / "1.npy", np.zeros(3))
    assert "2 classes, named in classes.txt" in run("root", "set", "--ragged", "array").output


@pytest.mark.parametrize(
    ("words", "text", "kind"),
    [
        (["--field", "x"], "--field must be NAME=SOURCE", ConfigError),
        (
            ["--field", "x=x", "--field", "x=y"],
            "a different word as NAME of each field",
            ConfigError,
        ),
        (["--resize", "2by2"], "got '2by2'; for example, use 224x224", ConfigError),
        (["--samples-per-shard", "2", "--shard-size", "1MB"], "omit one", ConfigError),
        (["--shard-size", "much"], 'such as "25 MiB"', ConfigError),
        (["--shard-size", "512"], 'write "512 B" for bytes', ConfigError),
        (["--resize", "3", "--encoded"], "--resize 3x3 and --encoded", DataError),
        (["--encoded"], "--encoded must be used with tar, folder", DataError),
    ],
)
def test_invalid_options_are_rejected(run, words, text, kind):
    result = run("a.npz", "set", *words)
    assert isinstance(result.exception, kind)
    assert text in str(result.exception)


def test_the_help_shows_every_kind_of_source(run):
    text = run("--help").output
    for word in ("digits.npz", "big.h5", "photos/", "'shards/*.tar'", "table.csv", "my_code:"):
        assert word in text


@pytest.mark.parametrize(("total", "shown"), [(100, "50%"), (None, "50 ")])
def test_the_bar_shows_the_resumed_position(monkeypatch, total, shown):
    for is_terminal in (True, False):
        out = StringIO()
        console = Console(file=out, force_terminal=is_terminal, width=100)
        monkeypatch.setattr(
            "hpctrain.cli.shared_work.make_console", lambda made=console, **_: made
        )
        with ToolBar("packing", None) as bar:
            bar.start(total, 40)(10)
        assert (shown in out.getvalue()) == is_terminal
        assert ("packing" in out.getvalue()) == is_terminal


@pytest.mark.ranks(2, 3)
def test_ranks_share_the_work_and_all_stop_at_an_error(tmp_path):
    hpctrain.init(ranks_per_node=2)
    comm = current().comm
    folder = Path(comm.broadcast_object(str(tmp_path)))
    if comm.rank == 0:
        np.savez(folder / "a.npz", x=np.arange(101))
    words = ["data", "pack", str(folder / "a.npz"), str(folder / "set")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0
    made = f"set: 101 samples in {comm.size} shards, "
    assert (made in result.output) == (comm.rank == 0)
    assert read_whole(folder / "set")["x"] == list(range(101))
    # One rank prints this error; a DataError of one rank would end all others.
    result = CliRunner().invoke(app, words)
    assert isinstance(result.exception, MismatchError)
    assert "already contains a data set" in str(result.exception)
    hpctrain.shutdown()
