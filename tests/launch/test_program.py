import shutil
import sys

import pytest

from hpctrain.core.errors import LaunchError
from hpctrain.launch.program import resolve


@pytest.mark.parametrize(
    ("argv", "resolved"),
    [
        (["python", "x.py", "-n", "3"], [sys.executable, "x.py", "-n", "3"]),
        (["python3", "-c", "pass"], [sys.executable, "-c", "pass"]),
        (["hpctrain", "train", "a.toml"], [sys.executable, "-m", "hpctrain", "train", "a.toml"]),
        (["sh", "-c", "true"], [shutil.which("sh"), "-c", "true"]),
    ],
)
def test_bare_names_are_this_environments(argv, resolved):
    assert resolve(argv) == resolved


@pytest.mark.parametrize("name", ["train.py", "with blank.py", "quo'te.py"])
def test_a_script_runs_under_this_interpreter(tmp_path, name):
    script = tmp_path / name
    script.touch()
    assert resolve([str(script), "--lr", "1"]) == [sys.executable, str(script), "--lr", "1"]


@pytest.mark.parametrize("name", ["missing.py", "no-such-program"])
def test_what_is_not_there_is_named(name):
    with pytest.raises(LaunchError, match=f"'{name}'"):
        resolve([name])
