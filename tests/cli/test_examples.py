"""Check that ``hpctrain examples`` writes the files that guides name, and the wheel has them."""

from configparser import ConfigParser
from pathlib import Path

from typer.testing import CliRunner

from hpctrain.cli.examples import write_examples
from hpctrain.cli.main import app
from tests.train.starting import ROOT

EXAMPLES = ROOT / "examples"


def test_examples_are_written_and_existing_files_kept(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("examples").mkdir()
    Path("examples/digits.toml").write_text("mine")
    result = CliRunner().invoke(app, ["examples"])
    assert result.exit_code == 0
    assert Path("examples/digits.toml").read_text() == "mine"
    for name in ("digits.py", "tour/03_synchronous.py", "lm/train.py", "clicks/clicks.toml"):
        assert Path("examples", name).read_bytes() == (EXAMPLES / name).read_bytes()
    assert write_examples() == []


def test_the_wheel_has_every_file(tmp_path):
    settings = ConfigParser(delimiters=("=",))
    settings.optionxform = str
    settings.read(ROOT / "setup.cfg")
    packed = {
        f"{target.removeprefix('share/hpctrain/')}/{path.name}"
        for target, patterns in settings["options.data_files"].items()
        for pattern in patterns.split(",")
        for path in ROOT.glob(pattern.strip())
    }
    written = write_examples(tmp_path)
    assert packed == {f"examples/{path.relative_to(tmp_path)}" for path in written}
