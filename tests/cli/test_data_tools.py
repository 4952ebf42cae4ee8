"""Check ``hpctrain data info, verify, repair, reshard, split`` on the command line."""

import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import hpctrain
from hpctrain.cli.main import app
from hpctrain.core.errors import ConfigError, DataError, MismatchError
from hpctrain.data.format.dataset_manifest import Manifest
from hpctrain.data.writer import write_arrays
from tests.data.mixed_set import flip, numbers_in, write_mixed
from tests.processes import ended, hpctrain_without


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    directory = tmp_path_factory.mktemp("original") / "set"
    write_mixed(directory, compression="zstd")
    return directory


@pytest.fixture
def damaged(original, tmp_path):
    directory = shutil.copytree(original, tmp_path / "set")
    shard = Manifest.read(directory).shards[1]
    flip(directory / shard.file, shard.places["number"].offset)
    return directory


def run(*words):
    return CliRunner().invoke(app, ["data", *map(str, words)])


def test_info_shows_fields_shards_and_a_sample_also_as_json(original, tmp_path):
    result = run("info", original, "--sample", 4)
    assert result.exit_code == 0
    assert "100 samples of the split train" in result.output
    assert "(length, 4; mean length 1.0)" in result.output
    assert result.output.count("here") == 3
    assert "sample 4: text (4,) 4 4 4 4\n" in result.output
    record = json.loads(run("info", original, "--json", "--sample", 1).output)
    assert record["num_samples"] == 100
    assert [field["name"] for field in record["fields"]][:2] == ["image", "number"]
    assert record["sample"]["index"] == 1
    assert "sample" not in json.loads(run("info", original, "--json").output)
    values = {"x": np.array([123456789]), "y": np.array([0.1], "f4"), "z": np.array([True])}
    write_arrays(tmp_path, values, samples_per_shard=1)
    output = run("info", tmp_path, "--sample", 0).output
    for line in ("x () 123456789\n", "y () 0.1\n", "z () 1\n", "\n1 shard, "):
        assert line in output


def test_verify_ends_with_0_1_or_2(original, damaged, tmp_path):
    assert run("verify", original).exit_code == 0
    result = run("verify", damaged)
    assert result.exit_code == 1
    assert "block 0 of field number has changed (samples 40-46)" in result.output
    assert "damaged: 7 of 100 samples cannot be read" in result.output
    assert f"hpctrain data repair {damaged} --from COPY" in result.output
    (fault,) = json.loads(run("verify", damaged, "--json").output)["faults"]
    assert (fault["shard"], fault["field"], fault["blocks"]) == (1, "number", [0])
    assert fault["samples"] == [[40, 47]]
    command = [sys.executable, "-m", "hpctrain", "data", "verify", tmp_path / "none"]
    done = ended(command)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert run("verify").exit_code == 2


def test_verify_loads_no_torch(original):
    assert hpctrain_without("torch", "data", "verify", original).returncode == 0


def test_repair_takes_from_a_copy(original, damaged):
    assert run("repair", damaged).exit_code == 1
    (damaged / Manifest.read(damaged).shards[0].file).unlink()
    (damaged / "manifest.json").unlink()
    assert "restore the manifest from another copy" in run("verify", damaged).output
    result = run("repair", damaged, "--from", original)
    assert result.exit_code == 0
    assert "copied train-" in result.output
    assert "intact: 100 samples in 3 shards" in result.output
    assert numbers_in(damaged) == list(range(100))


def test_reshard_and_split_report_the_written_data_sets(original, tmp_path):
    result = run(
        "reshard", original, tmp_path / "out", "--shard-size", "1KiB", "--compression", "none"
    )
    assert result.output.startswith(f"{tmp_path / 'out'}: 100 samples in ")
    result = run("split", tmp_path / "out", tmp_path, "train=0.9", "test=0.1")
    assert f"{tmp_path / 'train'}: 90 samples in " in result.output
    assert f"{tmp_path / 'test'}: 10 samples in 1 shard, " in result.output
    assert isinstance(run("split", original, tmp_path / "x", "train=0.9").exception, DataError)


@pytest.mark.ranks(2, 3)
def test_one_rank_prints_and_all_ranks_have_the_same_exit_code(world, tmp_path_factory):
    directory = Path(world.bcast(str(tmp_path_factory.mktemp("shared"))))
    if world.rank == 0:
        write_mixed(directory / "set")
        shard = Manifest.read(directory / "set").shards[1]
        flip(directory / "set" / shard.file, shard.places["number"].offset)
    world.Barrier()
    result = run("verify", directory / "set")
    assert result.exit_code == 1
    assert ("damaged: 7 of 100 samples" in result.output) == (world.rank == 0)
    result = run("reshard", directory / "set", directory / "out")
    hpctrain.shutdown()
    assert isinstance(result.exception, MismatchError)  # main prints it once
    assert "block 0 of field number has the wrong crc32" in str(result.exception)
    assert not (directory / "out" / "manifest.json").exists()


def test_split_by_label_writes_a_file_and_reports_the_labels_of_each_part(tmp_path):
    labels = np.arange(60) % 15
    write_arrays(tmp_path / "set", {"y": labels, "kind": labels % 2}, samples_per_shard=30)
    out = tmp_path / "clients.npz"
    options = ("--by-label", "inf", "--parts", 25)
    lines = run("split", tmp_path / "set", out, *options, "--label", "kind").output.splitlines()
    assert lines[0].split() == ["part", "samples", "kind=0", "kind=1"]
    assert lines[1].split()[0] == "0"
    assert [len(lines), lines[-1]] == [23, f"{out}: 60 samples in 25 parts, by kind"]
    with pytest.raises(DataError, match="must not exist, but"):
        raise run("split", tmp_path / "set", out, *options).exception
    lines = run(
        "split", tmp_path / "set", tmp_path / "y.npz", "--by-label", 9, "--parts", 2
    ).output
    assert lines.splitlines()[0].endswith("y=11  ...")
    for words in (
        ["--by-label", 1],
        ["--parts", 2],
        ["a=1", "--label", "y"],
        ["a=1", *options],
        [],
    ):
        with pytest.raises(ConfigError, match="--by-label"):
            raise run("split", tmp_path / "set", tmp_path / "c", *words).exception
