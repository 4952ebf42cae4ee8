"""What is in PATH is found, what is not is not."""

import sys
import sysconfig
from pathlib import Path

import pytest

from hpctrain.launch.horovod import mpi as mpis
from hpctrain.launch.horovod import tools
from hpctrain.launch.horovod.tools import find_cmake, find_compiler, find_cuda, look
from tests.launch.horovod.machine import executable


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """A PATH with nothing in it, and an environment without programs of its own."""
    monkeypatch.setattr(sys, "executable", str(tmp_path / "bin/python"))
    (tmp_path / "bin").mkdir()
    return {"PATH": str(tmp_path / "bin")}


def test_without_programs_in_path_each_is_missing(empty, monkeypatch):
    monkeypatch.setattr(tools, "find_mpi", lambda _environ: (None, "there is none; get one"))
    found = look(empty)
    assert (found.compiler, found.cmake, found.maker, found.mpi, found.mpicxx) == (None,) * 5
    assert found.mpi_error == "there is none; get one"
    assert found.to_fetch == ("cmake", "ninja")


def test_this_machine_is_looked_at_as_it_is():
    found = look()
    assert found.torch.startswith("2.")
    assert found.has_pip
    assert found.standard == 20
    assert found.memory_bytes > 0
    assert found.num_cores >= 1
    assert found.has_header == (Path(sysconfig.get_path("include")) / "Python.h").exists()
    assert found.mpi.library.name.startswith("libmpi")
    assert found.mpicxx.parent == Path(sys.executable).parent  # of the package, beside its library
    assert found.has_mpi_header


def test_a_compiler_must_know_the_standard(empty, tmp_path):
    executable(tmp_path / "bin/g++", "echo 'g++: error: unrecognized option' >&2; exit 1")
    assert find_compiler(empty, 20).error == "g++: error: unrecognized option"
    executable(tmp_path / "bin/c++", "exit 0")
    found = find_compiler(empty, 20)
    assert (found.path.name, found.error) == ("c++", "")
    assert find_compiler(empty | {"CXX": "g++ -O3"}, 20).path.name == "g++"
    assert find_compiler(empty | {"CXX": "icpx"}, 20) is None


@pytest.mark.parametrize(
    ("version", "is_good"), [("3.13.0", True), ("4.1.2", True), ("3.5", False)]
)
def test_a_cmake_must_be_new_enough(empty, tmp_path, version, is_good):
    executable(tmp_path / "bin/cmake", f"echo cmake version {version}")
    assert (find_cmake(empty) is not None) == is_good


def test_cuda_and_nccl_are_found_where_horovod_looks(empty, tmp_path):
    torch = tmp_path / "torch"
    torch.mkdir()
    (torch / "version.py").write_text("cuda: Optional[str] = '13.0'\n")
    executable(tmp_path / "cuda/bin/nvcc", "exit 0")
    (tmp_path / "nccl/include").mkdir(parents=True)
    (tmp_path / "nccl/include/nccl.h").touch()
    found = find_cuda(
        empty | {"CUDA_HOME": str(tmp_path / "cuda"), "HOROVOD_NCCL_HOME": str(tmp_path / "nccl")},
        torch,
    )
    assert found.torch == "13.0"
    assert found.nvcc == tmp_path / "cuda/bin/nvcc"
    assert found.nccl == tmp_path / "nccl/include/nccl.h"
    (torch / "version.py").write_text("cuda: Optional[str] = None\n")
    assert find_cuda(empty, torch).torch == ""


@pytest.fixture
def site(tmp_path):
    """An MPI of a site, with its compiler in the same tree."""
    library = tmp_path / "mpi/lib/libmpi.so.40.40.11"
    library.parent.mkdir(parents=True)
    library.touch()
    (library.parent / "libmpi.so").symlink_to(library.name)
    return mpis.Mpi(vendor="openmpi", version="5.0.11", library=library)


def wrapper(path, library, include="/nowhere"):
    return executable(path, f"echo g++ -I{include} -L{library.parent} -lmpi")


def test_the_compiler_of_an_mpi_is_the_one_that_links_its_library(site, tmp_path):
    other = tmp_path / "other/lib/libmpi.so.40.40.11"
    other.parent.mkdir(parents=True)
    other.touch()
    path = {"PATH": f"{tmp_path / 'other/bin'}:{tmp_path / 'module/bin'}"}
    wrapper(tmp_path / "other/bin/mpicxx", other)
    assert mpis.find_compiler(site, path) is None
    named = wrapper(tmp_path / "module/bin/mpicxx", site.library)
    assert mpis.find_compiler(site, path) == named
    beside = wrapper(tmp_path / "mpi/bin/mpicxx", site.library)
    assert mpis.find_compiler(site, path) == beside
    debian = wrapper(tmp_path / "mpi/bin/mpicxx.openmpi", site.library)
    assert mpis.find_compiler(site, path) == debian


def test_the_header_is_looked_for_where_the_compiler_does(site, tmp_path):
    program = wrapper(tmp_path / "mpi/bin/mpicxx", site.library, tmp_path / "include")
    assert not mpis.has_header(program)
    (tmp_path / "include").mkdir()
    (tmp_path / "include/mpi.h").touch()
    assert mpis.has_header(program)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Open MPI v5.0.11, package: Open MPI user@host, ident: 5.0.11", ("openmpi", "5.0.11")),
        ("MPICH Version:      5.0.2\nMPICH Release date: ...", ("mpich", "5.0.2")),
        ("Intel(R) MPI Library 2021.12 for Linux* OS\n", ("intelmpi", "2021.12")),
        (
            "MPI VERSION    : CRAY MPICH version 8.1.25 (ANL base 3.4a2)",
            ("craympich", "8.1.25"),
        ),
        ("something new", ("mpi", "")),
    ],
)
def test_vendors_and_versions(text, expected):
    assert mpis.parse_version(text) == expected
