"""Check that ``import hpctrain`` loads few modules, and neither torch, nor MPI, nor a compiler."""

import os
import sys

import pytest

from tests.processes import ended

MAX_MODULES = 12

LOADED = """
import sys
before = set(sys.modules)
import hpctrain
print("\\n".join(sorted(set(sys.modules) - before)))
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


def test_import_loads_few_modules():
    """Each module costs time at the start of every process, torch, NumPy and MPI most."""
    loaded = run(LOADED).split()
    assert "hpctrain" in loaded
    assert len(loaded) <= MAX_MODULES, loaded


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
