"""Check that paths are made absolute when received, and that other values are rejected."""

import os
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from hpctrain.core import paths
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError
from hpctrain.core.paths import absolute
from tests.processes import ended


class Named:
    def __fspath__(self):
        return "a/b"


@pytest.mark.parametrize("path", ["a/b", Path("a/b"), Named()], ids=["str", "Path", "PathLike"])
def test_a_relative_path_starts_at_the_directory_of_the_call(tmp_path, monkeypatch, path):
    monkeypatch.chdir(tmp_path)
    assert absolute(path) == tmp_path / "a/b"
    assert absolute("/x/../y") == Path("/x/../y")
    assert absolute("~/x") == tmp_path / "~/x"


def test_symbolic_links_stay(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    monkeypatch.chdir(tmp_path)
    assert absolute("link/x") == tmp_path / "link/x"


@pytest.mark.parametrize("path", [None, 3, b"x", ["x"]])
def test_values_that_are_no_paths_are_rejected(path):
    with pytest.raises(ConfigError, match="a path must be a str or an"):
        absolute(path)


def test_a_removed_directory_is_an_error_for_relative_paths_alone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert absolute("/x") == Path("/x")
    with pytest.raises(ConfigError, match="give an absolute path"):
        absolute("x")
    with pytest.raises(ConfigError, match=r"must exist, but was removed; change to another dir"):
        absolute("")


@pytest.mark.parametrize("name", ["PLAN", "LOG_DIR", "RECORDS", "STAGE_DIR", "TIMELINE"])
def test_variables_name_paths_from_where_the_program_was_started(tmp_path, monkeypatch, name):
    monkeypatch.setattr(paths, "START", str(tmp_path))
    monkeypatch.chdir("/")
    settings = Settings.from_env({f"HPCTRAIN_{name}": "x"})
    assert getattr(settings, name.lower()) == tmp_path / "x"
    with pytest.raises(ConfigError, match=f"HPCTRAIN_{name}: .* must not be empty"):
        Settings.from_env({f"HPCTRAIN_{name}": ""})


def test_the_program_starts_where_it_imports_the_package(tmp_path):
    code = """
        import os, hpctrain
        os.chdir("/")
        hpctrain.record(step=0, samples=1)
        hpctrain.init()
        print(hpctrain.current().settings.log_dir)
    """
    found = ended(
        [sys.executable, "-c", dedent(code)],
        cwd=tmp_path,
        env={**os.environ, "HPCTRAIN_RECORDS": "records", "HPCTRAIN_LOG_DIR": "log"},
    )
    assert found.stdout == f"{tmp_path / 'log'}\n", found.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["records"]
