import json

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.train.run_directory import RunDirectory, environment


def test_a_new_directory_has_all_its_parts(tmp_path):
    directory = RunDirectory(tmp_path / "a" / "b")
    directory.create("seed = 1\n", environment(), {"plan": {"rails": 1}})
    assert {path.name for path in directory.path.iterdir()} == {
        "config.toml", "env.json", "plan.json", "log", "checkpoints", "plots",
    }  # fmt: skip
    assert directory.config.read_text() == "seed = 1\n"
    assert json.loads(directory.plan.read_text()) == {"plan": {"rails": 1}}
    facts = json.loads(directory.environment.read_text())
    assert facts["torch"]
    assert facts["command"]


def test_a_used_directory_is_refused_and_left_as_it_is(tmp_path):
    directory = RunDirectory(tmp_path / "a")
    directory.create("seed = 1\n", {}, {})
    with pytest.raises(ConfigError, match="--set output_dir="):
        directory.create("seed = 2\n", {}, {})
    assert directory.config.read_text() == "seed = 1\n"


def test_logs_that_came_first_do_not_make_a_directory_used(tmp_path):
    directory = RunDirectory(tmp_path)
    directory.logs.mkdir()
    (directory.logs / "rank-0.log").touch()
    directory.create("", {}, {})


def test_a_place_that_cannot_be_written_is_an_error_of_ours(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot be written: .*--set output_dir="):
        RunDirectory(tmp_path / "file").create("", {}, {})
