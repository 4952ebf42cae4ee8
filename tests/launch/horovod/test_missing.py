"""Everything that is missing is named, at once, with what to install."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.core.units import GIB, MIB
from hpctrain.launch.horovod.missing import JOB_BYTES, BuildPlan, jobs_of, missing, refusal
from hpctrain.launch.horovod.tools import Compiler, Cuda, Tools
from tests.launch.horovod.machine import MPI, WHOLE

OF_DEBIAN = replace(MPI, library=Path("/usr/lib/x86_64-linux-gnu/openmpi/lib/libmpi.so.40.30.4"))

ABSENT = {
    "python": ({"implementation": "pypy"}, "CPython", "CPython"),
    "pip": ({"has_pip": False}, "no pip", "ensurepip"),
    "managed": ({"managed": "/usr/EXTERNALLY-MANAGED"}, "EXTERNALLY-MANAGED", "venv"),
    "headers": ({"has_header": False}, "Python.h", "apt-get install python3-dev"),
    "torch": ({"torch": ""}, "there is none", "pip install 'torch"),
    "compiler": ({"compiler": None}, "C++20", "apt-get install g++"),
    "old compiler": (
        {"compiler": Compiler(path=Path("/usr/bin/c++"), error="unrecognized -std=c++20")},
        "unrecognized -std=c++20",
        "GCC 10",
    ),
    "mpi": ({"mpi": None, "mpi_error": "no library; load a module"}, "no library", "a module"),
    "mpicxx": ({"mpicxx": None}, "/opt/mpi/lib", "the module of that MPI"),
    "mpicxx of Debian": (
        {"mpicxx": None, "mpi": OF_DEBIAN},
        "has its mpicxx",
        "apt-get install libopenmpi-dev",
    ),
    "mpi.h": (
        {"has_mpi_header": False, "mpi": OF_DEBIAN},
        "mpi.h",
        "apt-get install libopenmpi-dev",
    ),
    "memory": ({"memory_bytes": 100 * MIB}, "100.0 MiB are left", "more memory"),
    "disk": ({"disk_bytes": MIB}, "1.0 MiB left", "TMPDIR"),
}


def test_nothing_is_missing_on_a_whole_machine():
    assert missing(WHOLE, BuildPlan()) == []
    assert WHOLE.to_fetch == ()


@pytest.mark.parametrize("name", ABSENT)
def test_each_thing_is_named_with_the_way_out(name):
    changes, what, do = ABSENT[name]
    (found,) = missing(replace(WHOLE, **changes), BuildPlan())
    assert what in found.what
    assert do in found.do


def test_all_is_said_at_once():
    found = missing(Tools(torch="", disk_bytes=0, has_pip=False), BuildPlan(gpu="nccl"))
    error = str(refusal(found))
    assert f"{len(found)} things are missing" in error
    assert len(found) >= 6
    for each in found:
        assert f"  {each.what}\n    do: {each.do}" in error


def test_cmake_and_make_are_brought_by_pip():
    tools = replace(WHOLE, cmake=None, maker=None)
    assert missing(tools, BuildPlan()) == []
    assert tools.to_fetch == ("cmake", "ninja")


def test_a_wheel_alone_may_be_made_where_nothing_may_be_installed():
    tools = replace(WHOLE, managed="/usr/EXTERNALLY-MANAGED")
    assert missing(tools, BuildPlan(install=False)) == []


@pytest.mark.parametrize(
    ("memory", "cores", "jobs"),
    [(16 * GIB, 4, 4), (2 * JOB_BYTES, 4, 2), (1, 4, 1), (None, 8, 8)],
)
def test_as_many_compilers_as_cores_and_memory_allow(memory, cores, jobs):
    assert jobs_of(replace(WHOLE, memory_bytes=memory, num_cores=cores), BuildPlan()) == jobs


def test_too_many_jobs_are_refused_with_a_number_that_fits():
    tools = replace(WHOLE, memory_bytes=3 * JOB_BYTES)
    assert missing(tools, BuildPlan(jobs=3)) == []
    (found,) = missing(tools, BuildPlan(jobs=4))
    assert found.do == "--jobs 3"


def test_nccl_needs_cuda_and_its_headers():
    found = missing(WHOLE, BuildPlan(gpu="nccl"))
    for each, word in zip(found, ("torch with", "nvcc", "nccl.h"), strict=True):
        assert word in each.what
    cuda = Cuda(torch="13.0", nvcc=Path("/cuda/bin/nvcc"), nccl=Path("/cuda/include/nccl.h"))
    assert missing(replace(WHOLE, cuda=cuda), BuildPlan(gpu="nccl")) == []
