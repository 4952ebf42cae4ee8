"""Check ``hpctrain shim``: errors, and arguments passed to the script."""

import sys

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.core.errors import HpctrainError
from tests.processes import ended


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such.py"], "no-such.py"),
        (["."], "is a directory"),
        ([], "must get a script, got none"),
        (["-m"], "requires an argument"),
        (["--modul", "x"], "No such option"),
    ],
)
def test_invalid_scripts_raise_one_error(words, message):
    done = CliRunner().invoke(app, ["shim", *words])
    error = done.exception
    assert message in (str(error) if isinstance(error, HpctrainError) else done.stderr)


def test_a_module_that_is_not_there_is_pythons_error():
    line = [sys.executable, "-m", "hpctrain", "shim", "-m", "no_such_module", "--help"]
    done = ended(line)
    assert done.returncode == 1
    assert "No module named no_such_module" in done.stderr


def test_a_script_gets_all_arguments_and_a_process_with_another_path_no_shim(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import os, subprocess, sys, horovod\n"
        "code = 'import hpctrain.horovod.shim; print(hpctrain.horovod.shim.is_installed())'\n"
        "environ = dict(os.environ, PYTHONPATH=os.getcwd())\n"
        "print(horovod.__version__, sys.argv[1:], flush=True)\n"
        "subprocess.run([sys.executable, '-c', code], env=environ)\n"
    )
    for dashes in ([], ["--"]):
        line = [sys.executable, "-m", "hpctrain", "shim", *dashes, str(script)]
        line += ["-m", "x", "--help", "--", "y"]
        done = ended(line)
        assert done.stdout == "0.28.1+hpctrain ['-m', 'x', '--help', '--', 'y']\nFalse\n"
