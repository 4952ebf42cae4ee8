"""Check that ``make dist`` runs all commands and examples, and rejects a wheel with tests."""

import re
import zipfile
from pathlib import Path

import pytest

from hpctrain.cli.main import COMMANDS
from tests import dist

ROOT = Path(__file__).parents[1]
LINES = (*dist.COMMANDS, *dist.EXAMPLES)


def test_every_command_runs():
    found = {name for line in LINES for name in re.findall(r"\bhpctrain ([a-z]+)", line)}
    assert found == set(COMMANDS)


def is_example(path: Path) -> bool:
    return (
        path.suffix == ".toml" or "\n    hpctrain" in path.read_text() or "studies" in path.parts
    )


def test_every_example_runs_or_has_a_reason():
    folder = ROOT / "examples"
    examples = {
        path.relative_to(folder).as_posix()
        for suffix in ("py", "toml")
        for path in folder.rglob(f"*.{suffix}")
        if path.parent.name != "recipes" and is_example(path)
    }
    text = " ".join(LINES)
    assert {name for name in examples if f"examples/{name}" not in text} == set(dist.NOT_RUN)


@pytest.mark.parametrize("name", ["tests/test_x.py", "hpctrain/test_x.py", "perf/bench_all.py"])
def test_a_wheel_with_tests_is_rejected(tmp_path, name):
    wheel = tmp_path / "hpctrain-1.0-py3-none-any.whl"
    good = ("hpctrain/x.py", "hpctrain-1.0.data/data/share/hpctrain/examples/y.py")
    with zipfile.ZipFile(wheel, "w") as archive:
        for each in (*good, name):
            archive.writestr(each, "")
    assert dist.unexpected(wheel) == [name]
