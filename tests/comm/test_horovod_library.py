"""Check that Horovod is found and not changed, also if another module has the name horovod."""

import sys
from pathlib import Path

import pytest

from hpctrain.comm import horovod_engine
from hpctrain.comm.horovod_engine import library
from hpctrain.core.errors import LaunchError
from tests.processes import ended

OURS = Path("/usr/lib/libmpi.so.40")

STANDS_IN = """
import sys
from types import ModuleType
from mpi4py import MPI

alias = ModuleType("horovod")
alias.__hpctrain_shim__ = True

class Finder:
    hpctrain_shim = True
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.startswith("horovod"):
            raise ImportError("the shim was asked")

sys.meta_path.insert(0, Finder)
from hpctrain.comm.horovod_engine import library
for is_imported in (False, True):
    if is_imported:
        sys.modules["horovod"] = alias
    found = library.__wrapped__()
    assert callable(found.torch.allreduce_async_), found.torch
    assert sys.meta_path[0] is Finder
    assert [name for name in sys.modules if name.startswith("horovod")] == (
        ["horovod"] if is_imported else []
    )
    assert sys.modules.get("horovod") is (alias if is_imported else None)
"""


@pytest.mark.requires("horovod")
def test_replacement_of_horovod_is_kept_and_the_real_package_is_found():
    done = ended([sys.executable, "-c", STANDS_IN], timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "Horovod is not installed; run `hpctrain horovod build`"),
        ("", "was built without PyTorch or without MPI"),
        ("libmpi.so.12", r"for another MPI \(libmpi.so.12\)"),
    ],
)
def test_unusable_horovod_is_rejected_before_it_is_loaded(monkeypatch, found, message):
    monkeypatch.setattr(horovod_engine, "needed_mpi", lambda: found)
    monkeypatch.setattr(horovod_engine, "loaded_libmpi", lambda: (OURS,))
    with pytest.raises(LaunchError, match=message):
        library.__wrapped__()
