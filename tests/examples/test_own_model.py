"""README's recipe for one's own model does what it says; its last line, on two ranks."""

import re
import shlex
from pathlib import Path

import numpy as np
import pytest
from sklearn.datasets import load_digits
from typer.testing import CliRunner

from hpctrain.cli.main import app
from tests.train.starting import start

README = Path(__file__).parents[2].joinpath("README.md").read_text()


def block(language: str, name: str) -> str:
    return re.search(rf"```{language}\n(# {name}.*?)```", README, re.DOTALL)[1]


@pytest.mark.launches
@pytest.mark.limit(420)
def test_the_recipe_of_the_readme_trains_a_model_of_ones_own(tmp_path, monkeypatch):
    digits = load_digits()
    for part, rows in (("train", slice(0, 1024)), ("test", slice(1024, 1280))):
        x = digits.images[rows].astype(np.float32) / 16
        np.savez(tmp_path / f"{part}.npz", x=x, y=digits.target[rows])
    (tmp_path / "mine.py").write_text(block("python", "mine.py"))
    (tmp_path / "mine.toml").write_text(block("toml", "mine.toml"))
    recipe = README[README.index("## Your own model") : README.index("## Horovod scripts")]
    lines = [line.strip() for line in recipe.splitlines() if line.startswith("    hpctrain ")]
    assert len(lines) == 3
    monkeypatch.chdir(tmp_path)
    *before, train = map(shlex.split, lines)
    for _, *words in before:
        result = CliRunner().invoke(app, words)
        assert result.exit_code == 0, result.output
    assert train[:2] == ["hpctrain", "launch"]
    words = train[train.index("train") :]
    done = start("-m", "hpctrain", *words, num_ranks=2, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert float(re.search(r"test accuracy (0\.\d+)", done.stdout)[1]) > 0.7
