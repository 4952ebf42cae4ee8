import subprocess
import sys

import pytest


def hpctrain(*words, **how):
    line = [sys.executable, "-m", "hpctrain", "shim", *words]
    return subprocess.run(line, capture_output=True, text=True, check=False, **how)


def test_help_shows_examples():
    done = hpctrain("--help")
    assert done.returncode == 0
    assert "hpctrain shim train.py --epochs 3" in done.stdout
    assert "hpctrain launch -n 4 hpctrain shim train.py" in done.stdout


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "a script is needed, got none"),
        (["no-such.py"], "no-such.py"),
        (["."], "a folder is at"),
        (["-m", "no_such_module", "--help"], "there is no module 'no_such_module'"),
        (["-m", "no_such_package.module"], "No module named 'no_such_package'"),
        (["-m", "sys"], "there is no module 'sys' to run"),
        (["-m"], "requires an argument"),
        (["--modul", "x"], "No such option"),
    ],
)
def test_what_cannot_be_run_is_one_error_and_no_traceback(words, text, tmp_path):
    done = hpctrain(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_options_behind_the_script_are_its_own(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import sys, horovod; print(horovod.__version__, sys.argv[1:])")
    for dashes in ([], ["--"]):
        done = hpctrain(*dashes, str(script), "-m", "x", "--help", "--", "y")
        assert done.stdout == "0.28.1+hpctrain ['-m', 'x', '--help', '--', 'y']\n"


def test_no_other_process_is_touched(tmp_path):
    """The shim is no variable and no file: what a script starts has the Horovod it would have."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys, horovod\n"
        "code = 'import hpctrain.horovod.shim; print(hpctrain.horovod.shim.is_installed())'\n"
        "environ = dict(os.environ, PYTHONPATH=os.getcwd())\n"
        "subprocess.run([sys.executable, '-c', code], env=environ)\n"
    )
    assert hpctrain(str(script)).stdout == "False\n"
