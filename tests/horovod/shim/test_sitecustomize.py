"""A script under the shim runs as under ``python``, except for ``import horovod``."""

import os
import sys

import pytest

from tests.processes import ended

FACTS = """
import horovod, json, os, sys
print(horovod.__version__, json.dumps([
    sys.argv, sys.path[0], __name__, __file__, sys.path == list(dict.fromkeys(sys.path)),
    [folder for folder in sys.path if "shim" in folder], os.getcwd(),
]))
"""
STAND_IN = 'import sys, types\nsys.modules["horovod"] = types.SimpleNamespace(__version__="{}")\n'
VERSION = "0.28.1+hpctrain"

pytestmark = pytest.mark.launches


def run(*words, cwd, shim=True, **variables):
    line = [sys.executable, *(("-m", "hpctrain", "shim") if shim else ()), *words]
    path = os.pathsep.join([*variables.pop("folders", ()), *filter(None, sys.path)])
    environ = {**os.environ, "PYTHONPATH": path, **variables}
    return ended(line, cwd=cwd, env=environ)


@pytest.mark.parametrize(
    "words",
    [
        ["deep/facts.py", "--epochs", "3", "--help", "-m", "x"],
        ["-m", "deep.facts", "-n", "--", "2"],
    ],
    ids=["script", "module"],
)
def test_a_program_has_the_same_environment_as_under_python(words, tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/facts.py").write_text(FACTS)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(STAND_IN.format(VERSION))
    plain = run(*words, cwd=tmp_path, shim=False, folders=[str(tmp_path / "site")])
    shimmed = run(*words, cwd=tmp_path)
    assert plain.stdout.startswith(VERSION), plain.stderr
    assert (shimmed.stdout, shimmed.stderr) == (plain.stdout, "")


@pytest.mark.parametrize(
    ("code", "ending", "message"),
    [
        ("import sys; sys.exit('in words')", 1, "in words"),
        ("raise KeyboardInterrupt", -2, "KeyboardInterrupt"),
    ],
)
def test_a_program_ends_as_it_does_under_python(code, ending, message, tmp_path):
    (tmp_path / "script.py").write_text(code)
    done = run("script.py", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (ending, "")
    assert message in done.stderr


def test_the_sites_sitecustomize_runs_too_and_other_interpreters_are_unchanged(tmp_path):
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text("print('the site is here', flush=True)")
    (tmp_path / "other").symlink_to(sys.executable)
    (tmp_path / "script.py").write_text(
        "import hpctrain.horovod.shim as shim, subprocess, sys\n"
        "print(shim.is_installed(), flush=True)\n"
        "if len(sys.argv) == 1: subprocess.run(['./other', *sys.argv, 'child'])"
    )
    done = run("script.py", cwd=tmp_path, folders=[str(tmp_path / "site")])
    there = "the site is here\n"
    assert done.stdout == f"{there}{there}True\n{there}False\n", done.stderr


CHILDREN = """
import multiprocessing, subprocess, sys
import horovod
def version(_):
    return horovod.__version__, sys.argv[1:]
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, *pool.map(version, [0]), flush=True)
    subprocess.run([sys.executable, "-c", "import horovod; print(horovod.__version__)"])
"""


def test_child_processes_use_the_shim(tmp_path):
    (tmp_path / "script.py").write_text(CHILDREN)
    done = run("script.py", "--epochs", cwd=tmp_path)
    found = f"('{VERSION}', ['--epochs'])"
    message = [*(f"{method} {found}" for method in ("fork", "spawn", "forkserver")), VERSION]
    assert (done.stdout.splitlines(), done.stderr) == (message, "")
