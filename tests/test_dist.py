"""Check that ``make dist`` runs all commands and examples, and rejects a wheel with tests."""

import importlib
import re
import subprocess
import sys
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


def test_a_wheel_must_run_on_the_systems_that_its_name_promises(tmp_path):
    wheel = tmp_path / "hpctrain-1.0-py3-none-manylinux_2_17_x86_64.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("hpctrain/x.py", "")
    assert "result of auditwheel" in dist.fault_of(wheel)


@pytest.mark.parametrize(("slowness", "code"), [(1, 124), (1000, 0)])
def test_the_limit_of_a_command_follows_the_speed_of_the_machine(monkeypatch, slowness, code):
    monkeypatch.setattr(dist, "scaled", lambda limit_s: limit_s * slowness)
    with subprocess.Popen(["bash", "-c", "sleep 0.5 | cat"], start_new_session=True) as process:
        assert dist.wait(process, limit_s=0.1) == code


@pytest.fixture
def backend(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "hpctrain/comm/node")
    monkeypatch.setenv("CC", "gcc -m64")
    backend = importlib.import_module("kernel_build")
    monkeypatch.setattr(backend.build_meta, "get_requires_for_build_wheel", lambda _: [])
    return backend


def test_zig_compiles_a_wheel_for_other_machines(backend):
    portable = {"--build-option": "--plat-name=manylinux_2_17_aarch64"}
    assert backend.get_requires_for_build_wheel(portable) == ["ziglang"]
    command = backend._compiler("manylinux_2_17_aarch64")
    assert command[1:] == ["-m", "ziglang", "cc", "-target", "aarch64-linux-gnu.2.17"]


def test_the_compiler_of_this_machine_is_preferred_for_this_machine(backend, monkeypatch):
    assert backend._compiler("linux_x86_64") == ["gcc", "-m64"]
    assert backend.get_requires_for_build_editable() == []
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("PATH", "")
    assert backend._compiler("linux_x86_64")[:3] == [sys.executable, "-m", "ziglang"]
    assert backend.get_requires_for_build_editable() == ["ziglang"]
