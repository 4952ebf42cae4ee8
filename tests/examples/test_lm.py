"""Check the language model: equal losses in every layout, resume in another layout, and output."""

import importlib
import json
import os
import sys

import pytest
import torch
from typer.testing import CliRunner

import hpctrain
from hpctrain.cli.main import app
from tests.train.starting import ROOT, last_line, start

SEEDS = range(int(os.environ.get("TEST_LM_SEEDS", "0")))
"""``make soak`` trains with three, longer."""
LONGER = "--steps 60 --batch 16 --length 64 --width 32 --depth 2 --data"
SMALL = "--steps 10 --batch 16 --length 64 --width 32 --depth 2 --data"
FEW = ("", "--tp 2 --fsdp --sequence", "--pp 4", "--cp 2 --fsdp")
LAYOUTS = (*FEW, "--fsdp", "--tp 2 --pp 2", "--cp 4", "--cp 2 --pp 2", "--tp 2 --cp 2 --fsdp")


@pytest.fixture
def lm(monkeypatch):
    """Import the scripts from their folder."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/lm"))
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # ranks connect over MPI, repeatedly
        monkeypatch.delenv(name, raising=False)
    names = ("data", "model", "train", "generate")
    yield {name: importlib.import_module(name) for name in names}
    for name in names:
        del sys.modules[name]
    hpctrain.shutdown()


@pytest.mark.ranks(4)
@pytest.mark.limit(900)
@pytest.mark.parametrize("seed", SEEDS)
def test_every_layout_learns_as_much_from_every_seed(lm, tmp_path, world, seed):
    folder, losses = world.bcast(tmp_path), []
    for number, layout in enumerate(LAYOUTS):
        words = f"{LONGER} {folder}/data --output {folder}/{number} --seed {seed} {layout}"
        lm["train"].main(words.split())
        world.Barrier()
        losses.append(json.loads((folder / f"{number}/facts.json").read_text())["loss"])
    if world.rank == 0:
        sys.stdout.write(f"seed {seed}: {' '.join(f'{loss:.4f}' for loss in losses)}\n")
    assert max(losses) - min(losses) < 0.05
    assert max(losses) < 3.5


@pytest.mark.ranks(4)
@pytest.mark.limit(240)
@pytest.mark.parametrize(
    "layouts", [FEW, pytest.param(LAYOUTS, marks=pytest.mark.conformance)], ids=["few", "all"]
)
def test_every_layout_reaches_the_same_loss_and_goes_on_with_that_of_another(
    lm, tmp_path, world, capfd, layouts
):
    folder = world.bcast(tmp_path)

    def trained(number, layout):
        words = f"{SMALL} {folder}/data --output {folder}/{number} {layout}"
        lm["train"].main(words.split())
        world.Barrier()
        return json.loads((folder / f"{number}/facts.json").read_text())["loss"]

    losses = [trained(number, layout) for number, layout in enumerate(layouts)]
    assert losses == pytest.approx([losses[0]] * len(layouts), abs=1e-3)
    assert losses[0] < 5  # of 5.5 nats at the beginning
    on = trained(1, f"--resume --steps 13 {layouts[2]}")
    assert on == pytest.approx(trained(3, f"--resume --steps 13 {layouts[1]}"), abs=1e-3)
    capfd.readouterr()
    if world.rank == 0:
        with torch.random.fork_rng():
            lm["generate"].main([f"{folder}/2", "def f(", "--bytes", "20"])
        assert capfd.readouterr().out.startswith("def f(")


@pytest.mark.launches
@pytest.mark.conformance
@pytest.mark.limit(420)
def test_a_configuration_trains_in_a_layout_goes_on_in_another_and_writes_text(
    tmp_path, monkeypatch
):
    monkeypatch.setenv(
        "TORCH_DEVICE_BACKEND_AUTOLOAD", "0"
    )  # torch does not know the backend hpctrain
    small = {"data.args.num_windows": 160, "data.args.num_test": 64, "data.args.length": 64}
    places = {"data.args.folder": tmp_path / "data", "output_dir": tmp_path / "run"}
    words = [f"--set={key}={value}" for key, value in (small | places).items()]
    line = ["-m", "hpctrain", "train", ROOT / "examples/lm/lm.toml", *words]
    tried = start(*line, "--set=parallel.pp=2", "--dry-run", num_ranks=2)
    assert "a step and a test of one batch succeeded" in tried.stdout, tried.stderr
    start(*line, "--set=parallel.tp=2", "--set=parallel.zero=1", num_ranks=4)
    on = start(*line, "--set=parallel.pp=2", "--resume", "--set=train.epochs=2", num_ranks=2)
    assert on.returncode == 0, on.stderr
    message = " ".join(on.stdout.split())
    assert "the checkpoint was saved with dp=2 x tp=2 x zero=1, this run has pp=2" in message
    assert last_line(on.stdout).startswith("test loss 4.")  # of 5.5
    run, model = str(tmp_path / "run"), str(tmp_path / "model.pt")
    found = CliRunner().invoke(app, ["evaluate", run])
    assert last_line(found.output) == last_line(on.stdout)
    CliRunner().invoke(app, ["checkpoint", "export", run, model, "--only", "model"])
    wrote = start(ROOT / "examples/lm/generate.py", model, "def f(", "--bytes", "20")
    assert wrote.stdout.startswith("def f(")
