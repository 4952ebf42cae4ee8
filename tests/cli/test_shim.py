"""``hpctrain shim``: what it refuses, and what it leaves to the script."""

import subprocess
import sys

REFUSED = """
import sys
from typer.testing import CliRunner
from hpctrain.cli.main import app
from hpctrain.core.errors import HpctrainError

for words in (["-m", "no_such_module", "--help"], ["-m", "no_such_package.module"], ["-m", "sys"],
              ["no-such.py"], ["."], [], ["-m"], ["--modul", "x"]):
    done = CliRunner().invoke(app, ["shim", *words])
    error = done.exception
    print(error if isinstance(error, HpctrainError) else " ".join(done.stderr.split()))
"""


def test_what_cannot_be_run_is_one_error():
    """In one process, as a module that is looked for has the shim already."""
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], capture_output=True, text=True, check=True
    )
    assert [
        line
        for line, text in zip(
            done.stdout.splitlines(),
            [
                "there is no module 'no_such_module'",
                "No module named 'no_such_package'",
                "there is no module 'sys' to run",
                "no-such.py",
                "a folder is at",
                "a script is needed, got none",
                "requires an argument",
                "No such option",
            ],
            strict=True,
        )
        if text not in line
    ] == []


def test_a_script_has_all_behind_it_and_what_it_starts_has_no_shim(tmp_path):
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
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        assert done.stdout == "0.28.1+hpctrain ['-m', 'x', '--help', '--', 'y']\nFalse\n"
