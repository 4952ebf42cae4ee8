"""Check that every example works, and README's recipe for a user's own model."""

import importlib.util
import re
import shlex
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.compress.by_name import CODECS
from hpctrain.core.records import read
from hpctrain.data.reader import ShardedDataset
from hpctrain.studies.study_file import load
from tests.train.starting import ROOT, last_line, start

FOUR_LINES = ROOT / "examples/01_four_lines.py"
README = (ROOT / "README.md").read_text()
LONG = (pytest.mark.launches, pytest.mark.conformance)


def example(name: str) -> Any:
    """Import an example."""
    spec = importlib.util.spec_from_file_location(f"{name}_example", ROOT / f"examples/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def trained(folder, name: str, *settings: str, **how: int) -> tuple[dict[str, Any], str]:
    """Train with a configuration; return the last record, and the output."""
    folders = f"data.args.folder={folder}/data", f"output_dir={folder}/out"
    words = [word for setting in (*folders, *settings) for word in ("--set", setting)]
    done = start("-m", "hpctrain", "train", ROOT / f"examples/{name}.toml", *words, **how)
    assert done.returncode == 0, done.stderr
    record = read(folder / "out/metrics.jsonl")[-1]
    assert record["event"] == "finished"
    return record, done.stdout


def is_on_two_nodes(record: dict[str, Any]) -> bool:
    found = record["world_size"], record["nodes"], record["path"], record["rails"] >= 1
    return found == (4, 2, "memfd", True)


@pytest.mark.conformance
@pytest.mark.launches
def test_two_ranks_learn_who_clicks_from_rows_that_they_share(tmp_path):
    sizes = ("num_train=30000", "num_validation=2000", "num_test=4000")
    settings = (*(f"data.args.{size}" for size in sizes), "train.epochs=1")
    record, message = trained(tmp_path, "clicks/clicks", *settings, num_ranks=2)
    assert record["metric"] > 0.6
    assert last_line(message) == f"test auc {record['metric']:.4f}"


@pytest.mark.launches
@pytest.mark.conformance
@pytest.mark.limit(420)
def test_four_ranks_on_two_nodes_learn_the_digits_from_shards(tmp_path):
    record, message = trained(tmp_path, "digits", "train.epochs=8", num_ranks=4, nodes=2)
    assert record["metric"] >= 0.94
    assert is_on_two_nodes(record)
    assert last_line(message) == f"test accuracy {record['metric']:.4f}"
    tests = [each for each in read(tmp_path / "out/metrics.jsonl") if each["event"] == "test"]
    assert {each["num_samples"] for each in tests} == {144}  # the validation digits
    assert record["num_samples"] == 360
    for words in (["info"], ["verify"], ["export", tmp_path / "model.pt", "--only", "model"]):
        line = ["checkpoint", words[0], tmp_path / "out", *words[1:]]
        assert CliRunner().invoke(app, [*map(str, line)]).exit_code == 0
    assert torch.load(tmp_path / "model.pt", weights_only=True)


@pytest.mark.launches
def test_a_failure_in_the_middle_costs_the_steps_since_the_last_commit():
    options = ("--epochs", "8", "--fail-at", "150")
    done = start(ROOT / "examples/elastic_digits.py", *options, num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert "goes on from step 140\n" in done.stdout
    assert "rank 1: step 150 fails, as --fail-at wants it" in done.stderr
    assert float(last_line(done.stdout).removeprefix("test accuracy ")) >= 0.94


def test_the_marks_of_the_four_lines_are_there():
    marks = re.findall(r"  # (\d)\b", FOUR_LINES.read_text())
    assert marks == ["1", "2", "3", "4", "5"]


@pytest.mark.parametrize(
    ("how", "least"),
    [
        pytest.param({"num_ranks": 4, "nodes": 2}, 0.95, marks=pytest.mark.launches),
        pytest.param({}, 0.975, marks=LONG),
    ],
    ids=["two nodes", "alone"],
)
def test_four_lines_learn_the_digits(tmp_path, how, least):
    shorter = tmp_path / "script.py"
    rate = "LEARNING_RATE = 10," if how else "LEARNING_RATE = 30,"
    seeded = "import torch\n\ntorch.manual_seed(5)  # of the initial weights\n"
    text = FOUR_LINES.read_text().replace("LEARNING_RATE = 30,", rate)
    shorter.write_text(text.replace("import torch\n", seeded, 1))
    done = start(shorter, "--output", tmp_path, **how)
    assert done.returncode == 0, done.stderr
    (record,) = read(tmp_path / "metrics.jsonl")
    assert record["accuracy"] >= least
    assert is_on_two_nodes(record) if how else record["world_size"] == 1
    assert last_line(done.stdout) == f"test accuracy {record['accuracy']:.4f}"


@pytest.mark.launches
@pytest.mark.conformance
def test_ranks_that_agree_every_eight_steps_learn_the_digits(tmp_path):
    settings = ("train.epochs=8", "log.plots=false")
    record, message = trained(tmp_path, "local_sgd", *settings, num_ranks=2, nodes=2)
    assert "local_sgd, steps 8, compressed by bf16" in message
    assert record["metric"] >= 0.94
    assert record["rounds"] == -(-record["step"] // 8)
    gradients = 4 * record["parameters"] * record["step"]
    assert record["bytes_sent"] + record["bytes_saved"] == gradients
    halves = record["rounds"] * 2 * record["parameters"]
    assert record["bytes_sent"] == pytest.approx(halves, rel=0.01)


@pytest.mark.launches
@pytest.mark.conformance
def test_batches_eight_times_as_large_learn_the_digits(tmp_path):
    settings = ("log.plots=false", "train.check_replicas=1")
    record, _ = trained(tmp_path, "large_batch", *settings, num_ranks=2, nodes=2)
    assert record["metric"] >= 0.96
    steps = [r for r in read(tmp_path / "out/metrics.jsonl") if r["event"] == "step"]
    assert max(r["lr"] for r in steps) == pytest.approx(8 * 0.5, rel=0.1)
    assert any(r.get("noise_scale", 0) > 0 for r in steps)


@pytest.mark.parametrize("task", ["digits", "text"])
def test_a_study_of_codecs_has_all_of_them_each_with_keys_that_train_takes(task, monkeypatch):
    compressed, study = (
        example("compressed"),
        load(ROOT / f"examples/studies/compressed-{task}.toml"),
    )
    names = study.factors["codec"]
    assert sorted([*names, "fp16"]) == sorted(CODECS)  # bf16 is as good and needs no scale
    lines: list[list[str]] = []
    monkeypatch.setattr("os.execvp", lambda _, words: lines.append(words))
    for name in names:
        monkeypatch.setattr(
            "sys.argv", ["", task, name, "--out", "runs/x", "--explain", "sync.compression"]
        )
        compressed.main()
        message = CliRunner().invoke(app, lines[-1][1:])
        assert message.exit_code == 0, message.output
        assert re.search(rf'value +"{name}"', message.output)


@pytest.mark.launches
@pytest.mark.conformance
def test_digits_are_learnt_with_a_codec_from_fewer_bytes(tmp_path):
    how = ("--out", tmp_path / "out", "--set", "train.epochs=4")
    done = start(
        ROOT / "examples/compressed.py", "digits", "power_sgd", *how, num_ranks=2, nodes=2
    )
    assert done.returncode == 0, done.stderr
    assert read(tmp_path / "out/metrics.jsonl")[-1]["metric"] >= 0.85


def block(language: str, name: str) -> str:
    return re.search(rf"```{language}\n(# {name}.*?)```", README, re.DOTALL)[1]


OF_ONES_OWN = """
import os

import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
dataset = TensorDataset(torch.randn(200, 8), torch.randn(200, 1))
torch.manual_seed(int(os.environ.get("OMPI_COMM_WORLD_RANK", 0)))  # ranks begin differently
model = torch.nn.Linear(8, 1)


def train(model, loader, optimizer):
    for inputs, labels in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), labels).backward()
        optimizer.step()


"""
"""What the diff of README leaves out of a script."""


@pytest.mark.launches
def test_the_lines_of_the_readme_learn_on_two_ranks_what_one_process_learns(tmp_path):
    lines = re.search(r"```diff\n(.*?)```", README, re.DOTALL)[1].splitlines()
    for name, sign, num_ranks in (("before", "-", None), ("after", "+", 2)):
        kept = "\n".join(line[1:] for line in lines if line[:1] in ("", " ", sign))
        (tmp_path / f"{name}.py").write_text(f"{OF_ONES_OWN}{kept}\n")
        done = start(tmp_path / f"{name}.py", num_ranks=num_ranks, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        (tmp_path / "model.pt").rename(tmp_path / f"{name}.pt")
    before, after = (torch.load(tmp_path / f"{name}.pt") for name in ("before", "after"))
    torch.testing.assert_close(after, before)


@pytest.mark.launches
@pytest.mark.limit(420)
def test_the_recipe_of_the_readme_trains_a_model_of_ones_own(tmp_path, monkeypatch):
    digits = load_digits()
    for part, rows in (("train", slice(0, 1024)), ("test", slice(1024, 1280))):
        x = digits.images[rows] / 16  # float64, the default of NumPy
        np.savez(tmp_path / f"{part}.npz", x=x, y=digits.target[rows])
    (tmp_path / "mine.py").write_text(block("python", "mine.py"))
    (tmp_path / "mine.toml").write_text(block("toml", "mine.toml"))
    recipe = README.partition("## Your own model\n")[2].partition("\n## ")[0]
    lines = [line.strip() for line in recipe.splitlines() if line.startswith("    hpctrain ")]
    monkeypatch.chdir(tmp_path)
    found = []
    for _, *words in (shlex.split(line, comments=True) for line in lines):
        if words[0] != "launch":
            result = CliRunner().invoke(app, words)
            assert result.exit_code == 0, result.output
            continue
        command = words[words.index("hpctrain") + 1 :]
        done = start("-m", "hpctrain", *command, num_ranks=2, cwd=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        found += re.findall(r"^test accuracy (0\.\d+)", done.stdout, re.MULTILINE)
    assert found[0] == found[1]  # of the run, and evaluated again
    assert float(found[0]) > 0.7
    assert (tmp_path / "out.h5").is_file()


@pytest.mark.launches
@pytest.mark.conformance
def test_two_ranks_learn_text_that_they_have_not_seen(tmp_path):
    """Use fewer windows than the example: 80 steps of 16."""
    few = ("data.args.num_windows=1280", "data.args.num_test=64", "train.global_batch=16")
    record, message = trained(tmp_path, "text", *few, "log.plots=false", num_ranks=2)
    assert record["num_samples"] == 64
    assert record["metric"] <= 4.5  # 8 without any knowledge, 4.54 from the frequency of bytes
    assert record["metric"] == pytest.approx(record["loss"])
    assert last_line(message) == f"test bits_per_byte {record['metric']:.4f}"
    train, test = (ShardedDataset(tmp_path / "data" / split) for split in ("train", "test"))
    assert (len(train), len(test)) == (1280, 64)


@pytest.mark.launches
@pytest.mark.conformance
@pytest.mark.requires("transformers")
def test_a_network_of_transformers_learns_text_by_the_four_lines_and_by_a_configuration(tmp_path):
    few = ("data.args.num_windows=640", "data.args.num_test=64", "train.ema=0.9")
    record, message = trained(tmp_path, "gpt2", *few, "log.plots=false", num_ranks=2)
    assert record["metric"] <= 6.0  # 8 without any knowledge
    assert last_line(message) == f"test bits_per_byte {record['metric']:.4f}"
    options = ("--windows", "640", "--folder", tmp_path / "others")
    done = start(ROOT / "examples/gpt2.py", *options, num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert float(last_line(done.stdout).removeprefix("test bits_per_byte ")) <= 6.0


def test_no_byte_is_guessed_from_itself_or_from_later_ones_and_not_knowing_costs_eight_bits():
    text = example("text")
    torch.manual_seed(0)
    network = text.model(width=16, depth=2, num_heads=2).eval()
    windows = torch.randint(0, 256, (3, text.CONTEXT + 1), dtype=torch.uint8)
    other = windows[:1].clone()
    other[0, 70:] ^= 255
    with torch.no_grad():
        scores, changed = network(windows[:1]), network(other)
    # Score k belongs to byte k + 1.
    assert torch.equal(scores[0, :70], changed[0, :70])
    assert not torch.isclose(scores[0, 70:], changed[0, 70:]).all(dim=1).any()
    scores = torch.zeros(3, text.CONTEXT, 256)
    torch.testing.assert_close(text.bits_per_byte(scores, windows), torch.full((3,), 8.0))
    torch.testing.assert_close(text.loss(scores, windows), torch.tensor(8.0))


@pytest.mark.launches
@pytest.mark.conformance
def test_two_ranks_make_volumes_and_tell_their_parameters(tmp_path):
    """Use fewer volumes than the example: 193, of which 36 steps of 24 learn the easy two."""
    sizes = ("num_train=193", "num_validation=33", "num_test=65")
    few = (*(f"data.args.{size}" for size in sizes), "train.global_batch=24")
    rest = ("train.epochs=4", "test.every_epochs=4", "log.plots=false")
    record, message = trained(tmp_path, "volumes", *few, *rest, num_ranks=2)
    assert record["num_samples"] == 65
    assert record["metric"] <= 0.43  # predicting the mean gives 0.5
    assert last_line(message) == f"test absolute_error {record['metric']:.4f}"

    # Both ranks wrote, and together they wrote the set that one rank would write.
    train, volumes = ShardedDataset(tmp_path / "data/train"), example("volumes")
    assert [shard.num_samples for shard in train.manifest.shards] == [96, 97]
    for number in (0, 95, 96, 192):
        counts, parameters = volumes.cube(number)
        sample = train.take([number])
        np.testing.assert_array_equal(sample["counts"][0].numpy(), counts)
        np.testing.assert_array_equal(sample["parameters"][0].numpy(), parameters)


def test_the_field_grows_and_particles_are_kept():
    volumes = example("volumes")
    counts, parameters = volumes.cube(7)
    assert counts.shape == (4, 16, 16, 16)
    assert np.abs(parameters).max() <= 1
    means, spreads = counts.mean(axis=(1, 2, 3)), counts.std(axis=(1, 2, 3))
    np.testing.assert_allclose(means, volumes.PARTICLES_PER_CELL, rtol=0.05)
    assert (np.diff(spreads) < 0).all()  # the first channel is the latest, the last the earliest
    np.testing.assert_array_equal(counts, volumes.cube(7)[0])
    assert (counts != volumes.cube(8)[0]).any()
