"""``hpctrain horovod build`` as people call it; the real build is in tests/launch/horovod."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from hpctrain.cli.horovod_progress import Show
from hpctrain.cli.main import app
from hpctrain.launch.horovod import build as building
from hpctrain.launch.horovod.build import Built
from hpctrain.launch.horovod.missing import BuildPlan


def invoke(*words):
    return CliRunner().invoke(app, ["horovod", *words])


@pytest.mark.parametrize("words", [[], ["--help"], ["build", "--help"]])
def test_help_has_examples(words):
    assert "hpctrain horovod build" in invoke(*words).output


def test_options_reach_the_build(monkeypatch, tmp_path):
    asked = []

    def build(plan, _listener, *, wheel_dir, force):
        asked.append((plan, wheel_dir, force))
        return Built(wheel=tmp_path / "x.whl", is_cached=True, library=tmp_path / "libmpi.so")

    monkeypatch.setattr(building, "build", build)
    result = invoke("build", "--jobs", "3", "--gpu", "nccl", "--wheel-dir", str(tmp_path))
    assert result.exit_code == 0
    assert "built before" in result.output
    assert f"uses {tmp_path / 'libmpi.so'}" in result.output
    assert invoke("build", "--no-install", "--force").exit_code == 0
    assert asked == [
        (BuildPlan(jobs=3, gpu="nccl"), tmp_path, False),
        (BuildPlan(install=False), None, True),
    ]


@pytest.mark.parametrize("words", [["--gpu", "mpi"], ["--jobs", "0"]])
def test_a_mistake_is_refused(words):
    assert invoke("build", *words).exit_code != 0


@pytest.mark.limit(240)
def test_all_that_is_missing_is_one_error_and_nothing_is_compiled(tmp_path):
    """No compiler, no index, too many jobs: found in seconds, said together."""
    environ = {name: text for name, text in os.environ.items() if not name.startswith("PIP_")}
    environ |= {
        "CXX": "no-such-compiler",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
        "PIP_NO_CACHE_DIR": "1",
    }
    words = ["build", "--jobs", "100000", "--wheel-dir", str(tmp_path), "--gpu", "nccl"]
    done = subprocess.run(
        [sys.executable, "-m", "hpctrain", "horovod", *words],
        capture_output=True,
        text=True,
        check=False,
        env=environ,
    )
    assert done.returncode == 2
    for text in (
        "Horovod 0.28.1 cannot be built here",
        "apt-get install g++",
        "100000 compilers at a time",
        "pip fetches the sources of Horovod 0.28.1",
        "--gpu nccl needs NCCL's headers",
    ):
        assert text in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("*/*.whl"))


def test_help_imports_nothing_of_the_build():
    code = (
        "import sys, hpctrain.cli.main as main\n"
        "sys.argv = ['hpctrain', '--help']\n"
        "try: main.main()\n"
        "except SystemExit: pass\n"
        "found = {name for name in sys.modules if name.split('.')[0] == 'horovod'\n"
        "         or name.startswith('hpctrain.launch.horovod')}\n"
        "sys.exit(bool(found))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0


def test_a_file_gets_a_line_for_each_step_and_quarter(capsys):
    with Show() as show:
        show.step("compiling")
        for percent in range(0, 101, 5):
            show.percent(percent)
        show.say("something to read")
        show.step("installing")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "compiling ..."
    quarters = [line.split(" after")[0] for line in lines if " after " in line]
    assert quarters == [f"compiling: {percent} %" for percent in (25, 50, 75, 100)]
    assert "something to read" in lines
    assert [line.split(":")[0] for line in lines[-3:]] == [
        "compiling",
        "installing ...",
        "installing",
    ]
