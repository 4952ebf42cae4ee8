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
)
from hpctrain.launch import mpiexec

OPENMPI = Path("/venv/lib/libmpi.so.40")
MPICH = Path("/opt/mpich/lib/libmpi.so.12.5.0")
DEBIAN_OPENMPI = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40.30.4")
DEBIAN_MPICH = Path("/usr/lib/x86_64-linux-gnu/libmpich.so.12.2.0")
ABI = Path("/opt/mpich/lib/libmpi_abi.so.1")
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


@pytest.mark.parametrize(
    ("library", "name"),
    [
        *((path, "openmpi") for path in (OPENMPI, DEBIAN_OPENMPI, Path("/ibm/libmpi_ibm.so.3"))),
        *((path, "mpich") for path in (MPICH, DEBIAN_MPICH, CRAY)),
        (ABI, "abi"),
    ],
    ids=str,
)
def test_an_mpi_is_told_by_its_library(library, name):
    assert family(library) == name


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ((DEBIAN_OPENMPI, DEBIAN_MPICH), (DEBIAN_OPENMPI, DEBIAN_MPICH)),  # in one folder
        ((ABI, MPICH), (MPICH,)),
        ((ABI,), (ABI,)),
        ((ABI, OPENMPI), (OPENMPI, ABI)),
    ],
)
def test_files_of_one_mpi_in_one_folder_are_one_library(found, expected):
    assert distinct(found) == expected


def test_the_harness_has_loaded_one_mpi_and_a_python_without_it_none():
    assert MPI.Is_initialized()
    (library,) = distinct(loaded_libmpi())
    assert library.exists()
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
