"""Check that ``import hpctrain`` is fast and loads neither torch, nor MPI, nor a compiler."""

import json
import os
import sys

import pytest

from tests.processes import ended

MAX_IMPORT_S = 0.050
TRIES = 5

TIMED = """
import json, sys, time
start = time.perf_counter()
import hpctrain
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted({name.partition(".")[0] for name in sys.modules})]))
"""

BLOCKED = """
import sys
for name in ("mpi4py", "torch", "numpy", "h5py"):
    sys.modules[name] = None  # any import of it fails
"""


def run(code: str) -> str:
    done = ended([sys.executable, "-c", code], timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def imports():
    return [json.loads(run(TIMED)) for _ in range(TRIES)]


def test_import_loads_nothing_heavy(imports):
    _, modules = imports[0]
    assert {"torch", "mpi4py", "numpy", "h5py", "typer", "rich"}.isdisjoint(modules)


def test_import_takes_under_50_ms(imports):
    assert min(seconds for seconds, _ in imports) < MAX_IMPORT_S


def test_import_works_without_mpi_and_torch():
    assert run(f"{BLOCKED}\nimport hpctrain\nprint(hpctrain.__version__)").strip()


@pytest.mark.parametrize("package", ["cluster", "launch"])
def test_commands_of_a_login_node_need_neither_mpi_nor_torch(package):
    code = f"""{BLOCKED}
import importlib, pkgutil, hpctrain.{package} as package
for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
    importlib.import_module(module.name)
"""
    run(code)


def test_mpi_starts_without_home_when_a_module_loads_it():
    environ = {name: value for name, value in os.environ.items() if name != "HOME"}
    line = [sys.executable, "-c", "import hpctrain.train.run; print('loaded')"]
    done = ended(line, timeout=60, env=environ)
    assert done.stdout == "loaded\n", done.stderr
