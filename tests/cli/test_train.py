import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.core.errors import ConfigError
from hpctrain.train import toy_problem
from hpctrain.train.load_config import load


def invoke(*words):
    return CliRunner().invoke(app, ["train", *map(str, words)])


def test_init_writes_a_file_that_loads_and_never_replaces_one(tmp_path):
    path = tmp_path / "my.toml"
    assert invoke(path, "--init").exit_code == 0
    assert load(path).config == toy_problem.config()
    path.write_text("precious")
    assert isinstance(invoke(path, "--init").exception, ConfigError)
    assert path.read_text() == "precious"
    assert "must have the name" in str(invoke("--init").exception)
    assert "cannot be written" in str(invoke("/nowhere/at/all.toml", "--init").exception)


def test_explain_prints_value_and_source(tmp_path, monkeypatch):
    path = tmp_path / "my.toml"
    path.write_text("[comm]\noverlap = 'inline'\n")
    assert f"file {path}" in invoke(path, "--explain", "comm.overlap").output
    monkeypatch.setenv("HPCTRAIN_OVERLAP", "auto")
    output = invoke(path, "--explain", "comm.overlap").output
    assert 'value    "auto"' in output
    assert "environment HPCTRAIN_OVERLAP" in output
    output = invoke(path, "--set", "comm.overlap=end", "--explain", "comm.overlap").output
    assert "argument --set comm.overlap=end" in output


def test_explain_needs_no_file_and_knows_tables_and_a_run_needs_one():
    assert "train.global_batch" in invoke("--explain", "train").output
    assert "hpctrain train CONFIG.toml" in str(invoke().exception)


@pytest.mark.parametrize("variable", ["HPCTRAIN_OVERLAP", "HPCTRAIN_RANKS_PER_NODE"])
def test_a_wrong_variable_is_named(monkeypatch, variable):
    monkeypatch.setenv(variable, "nonsense")
    assert variable in str(invoke("--explain", "train").exception)
