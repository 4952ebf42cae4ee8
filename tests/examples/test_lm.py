"""The language model reaches one loss in every layout, goes on in any other, and writes text."""

import importlib
import json
import os
import sys

import pytest
import torch

import hpctrain
from tests.train.starting import ROOT

SEEDS = range(int(os.environ.get("HPCTRAIN_TEST_LM_SEEDS", "0")))
"""``make soak`` trains with three, longer."""
LONGER = "--steps 60 --batch 16 --length 64 --width 32 --depth 2 --data"
SMALL = "--steps 10 --batch 16 --length 64 --width 32 --depth 2 --data"
LAYOUTS = (
    "",
    "--fsdp",
    "--tp 2 --fsdp --sequence",
    "--pp 4",
    "--tp 2 --pp 2",
    "--cp 2 --fsdp",
    "--cp 4",
    "--cp 2 --pp 2",
    "--tp 2 --cp 2 --fsdp",
)


@pytest.fixture
def lm(monkeypatch):
    """Import the scripts as Python finds them where they lie."""
    monkeypatch.syspath_prepend(str(ROOT / "examples/lm"))
    for name in ("MASTER_ADDR", "MASTER_PORT"):  # ranks meet over MPI, again and again
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
def test_every_layout_reaches_the_same_loss_and_goes_on_with_that_of_another(
    lm, tmp_path, world, capfd
):
    folder = world.bcast(tmp_path)

    def trained(number, layout):
        words = f"{SMALL} {folder}/data --output {folder}/{number} {layout}"
        lm["train"].main(words.split())
        world.Barrier()
        return json.loads((folder / f"{number}/facts.json").read_text())["loss"]

    losses = [trained(number, layout) for number, layout in enumerate(LAYOUTS)]
    assert losses == pytest.approx([losses[0]] * len(LAYOUTS), abs=1e-3)
    assert losses[0] < 5  # of 5.5 nats at the beginning
    on = trained(4, f"--resume --steps 13 {LAYOUTS[1]}")
    assert on == pytest.approx(trained(2, f"--resume --steps 13 {LAYOUTS[3]}"), abs=1e-3)
    capfd.readouterr()
    if world.rank == 0:
        with torch.random.fork_rng():
            lm["generate"].main([f"{folder}/3", "def f(", "--bytes", "20"])
        assert capfd.readouterr().out.startswith("def f(")
