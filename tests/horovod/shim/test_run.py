"""A script below the shim sees what it sees under ``python``, but for ``import horovod``."""

import os
import subprocess
import sys

import pytest

FACTS = """
import atexit, json, os, sys
import __main__
atexit.register(print, "at exit")
print(json.dumps([
    sys.argv, sys.path[0], __name__, __file__, __package__, __doc__,
    __spec__ and __spec__.name, type(__loader__).__name__, type(__builtins__).__name__,
    sys.modules["__main__"] is __main__, vars(__main__) is globals(), os.getcwd(),
    sorted(name for name in globals() if name.startswith("__")),
]))
"""

pytestmark = pytest.mark.launches


def run(*words, cwd, shim, **variables):
    line = [sys.executable, *(("-m", "hpctrain", "shim") if shim else ()), *words]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **variables}
    return subprocess.run(
        line,
        cwd=cwd,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def both(*words, cwd, **variables):
    """Run under python and below the shim; return what each printed and its exit code."""
    plain, shimmed = (run(*words, cwd=cwd, shim=shim, **variables) for shim in (False, True))
    return tuple((done.stdout, done.stderr, done.returncode) for done in (plain, shimmed))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/facts.py").write_text(FACTS)
    (tmp_path / "deep/no_suffix").write_text(FACTS)
    (tmp_path / "link.py").symlink_to("deep/facts.py")
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("")
    (tmp_path / "package/__main__.py").write_text(FACTS)
    (tmp_path / "package/module.py").write_text(FACTS)
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        ["deep/facts.py", "--epochs", "3", "--help", "-m", "x"],
        ["deep/../deep/no_suffix"],
        ["link.py"],
        ["-m", "package", "--help"],
        ["-m", "package.module", "-n", "1", "--", "2"],
    ],
    ids=lambda words: words[0] if words[0] != "-m" else words[1],
)
def test_a_program_sees_what_it_sees_under_python(words, folder):
    plain, shimmed = both(*words, cwd=folder)
    assert plain[2] == 0
    assert shimmed == plain


def test_a_folder_that_is_kept_out_of_the_path_stays_out(folder):
    plain, shimmed = both("deep/facts.py", cwd=folder, PYTHONSAFEPATH="1")
    assert plain[2] == 0
    assert shimmed == plain


@pytest.mark.parametrize(
    "code",
    [
        "raise SystemExit(7)",
        "import sys; sys.exit('in words')",
        "def f():\n    raise EOFError('mine')\n\ntry:\n    f()\nexcept EOFError:\n    1 / 0",
        "x = (\n",
        "import sys; sys.excepthook = lambda *_: print('hooked'); raise OSError",
        "# coding: latin-1\nprint(ascii('\xe4'))",
        "import os; os._exit(3)",
    ],
)
def test_a_program_ends_as_it_does_under_python(code, tmp_path):
    (tmp_path / "script.py").write_text(code, encoding="latin-1")
    plain, shimmed = both("script.py", cwd=tmp_path)
    assert shimmed == plain


def test_ctrl_c_prints_what_python_prints_and_is_exit_code_130(tmp_path):
    (tmp_path / "script.py").write_text("raise KeyboardInterrupt")
    plain, shimmed = both("script.py", cwd=tmp_path)
    assert shimmed == (*plain[:2], 130)


def test_the_error_of_a_missing_name_shows_the_script_alone(tmp_path):
    (tmp_path / "script.py").write_text("import horovod.torch as hvd\nhvd.nonsense\n")
    done = run("script.py", cwd=tmp_path, shim=True)
    assert done.returncode == 1
    assert done.stderr.count('File "') == 1
    assert "'nonsense'" in done.stderr


CHILDREN = """
import multiprocessing, sys
import horovod
def version(_):
    return horovod.__version__, sys.argv[1:]
if __name__ == "__main__":
    for method in ("fork", "spawn", "forkserver"):
        with multiprocessing.get_context(method).Pool(1) as pool:
            print(method, *pool.map(version, [0]))
"""


@pytest.mark.parametrize("words", [["script.py"], ["-m", "script"]], ids=["script", "module"])
def test_processes_that_a_script_spawns_find_the_shim_too(words, tmp_path):
    (tmp_path / "script.py").write_text(CHILDREN)
    done = run(*words, "--epochs", cwd=tmp_path, shim=True)
    assert done.stderr == ""
    expected = "('0.28.1+hpctrain', ['--epochs'])"
    methods = ("fork", "spawn", "forkserver")
    assert done.stdout.splitlines() == [f"{method} {expected}" for method in methods]


LOADER = """
import torch
import horovod.torch as hvd
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return hvd.Compression.none.compress(torch.tensor(index))[0]
if __name__ == "__main__":
    hvd.init()
    loader = DataLoader(Numbers(), batch_size=2, num_workers=1, multiprocessing_context="spawn")
    print([batch.tolist() for batch in loader])
"""


@pytest.mark.limit(120)
def test_workers_of_a_data_loader_find_the_shim_too(tmp_path):
    (tmp_path / "script.py").write_text(LOADER)
    done = run("script.py", cwd=tmp_path, shim=True)
    assert done.stdout == "[[0, 1], [2, 3]]\n", done.stderr
