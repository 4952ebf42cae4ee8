"""Check the choice of the MPI library, and errors under the launcher of another library."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from hpctrain.cluster import libraries
from hpctrain.cluster.env import launched
from hpctrain.cluster.libraries import (
    distinct,
    expected_libmpi,
    family,
    libmpi_of,
    loaded_libmpi,
    may_spare_ofi,
    mismatch,
    mpirun_of,
    settings_of_mpi,
)
from hpctrain.cluster.preflight import (
    accelerator_warning,
    check_world,
    core_warning,
    threads_for,
)
from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.comm.mpi_world import find_world
from hpctrain.core.errors import LaunchError
from hpctrain.launch import mpiexec
from tests.harness import preload
from tests.processes import ended

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
def test_mpi_family_is_determined_by_its_library(library, name):
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


def test_mpirun_is_searched_in_the_tree_of_the_library(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "lib/openmpi").mkdir(parents=True)
    assert mpirun_of(Path("/nowhere/lib/libmpi.so.40")) is None
    (tmp_path / "bin/mpirun").touch()
    assert mpirun_of(tmp_path / "lib/libmpi.so.40") == tmp_path / "bin/mpirun"


@pytest.mark.launches
def test_launcher_is_found_above_a_shell():
    code = "from hpctrain.cluster.libraries import starter; print('by', starter())"
    line = mpiexec.command(["sh", "-c", f'{sys.executable} -c "{code}"; true'], num_ranks=1)
    done = subprocess.run(
        line, env=mpiexec.environment(), capture_output=True, text=True, check=True
    )
    program = Path(done.stdout.split("by ")[1].strip())
    assert program.name.startswith(("prte", "ort", "mpi", "hydra"))
    assert program.exists()


def by_srun(interface, size=4):
    message = {"SLURM_MPI_TYPE": interface} if interface else {}
    sizes = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": str(size)}
    return launched(sizes | message)


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
def test_mismatch_is_reported_with_the_remedy(found, library, needed):
    what, remedy = mismatch(found, library)
    assert bool(what) == bool(remedy) == bool(needed)
    if what:
        assert f"started 4 ranks with --mpi={found.pmi or 'none'}" in what
        assert str(library) in what
        assert f"`srun --mpi={needed} ...`, or inside the job with `hpctrain launch ...`" in remedy


def test_the_library_of_this_environment_is_expected_without_loading_it():
    find_world()
    assert expected_libmpi({}) in (
        None,
        *loaded_libmpi(),
    )  # unknown for a site's own library


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


def test_the_library_of_the_user_has_precedence(tmp_path):
    named = tmp_path / "libmpi.so.40"
    assert expected_libmpi({"MPI4PY_LIBMPI": str(named)}) == named
    assert expected_libmpi({"MPI4PY_LIBMPI": "libmpi.so.40"}) is None


@pytest.fixture
def no_cards(monkeypatch, tmp_path):
    """Remove fast network adapters and user files, and give MPI a separate folder."""
    monkeypatch.setattr(libraries, "CLASSES", (tmp_path / "cards",))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OMPI_MCA_btl", raising=False)
    monkeypatch.setenv("MPI4PY_LIBMPI", str(tmp_path / "mpi/lib/libmpi.so.40"))
    return tmp_path


def test_open_mpi_skips_the_ofi_btl_unless_it_is_requested(no_cards):
    assert may_spare_ofi()
    assert not may_spare_ofi({**os.environ, "OMPI_MCA_btl": "self,sm"})
    (no_cards / "cards").mkdir()
    assert not may_spare_ofi()


@pytest.mark.parametrize("file", [".openmpi/mca-params.conf", "mpi/etc/openmpi-mca-params.conf"])
def test_a_file_of_open_mpi_that_names_btls_stays_in_force(no_cards, file):
    path = no_cards / file
    path.parent.mkdir(parents=True)
    path.write_text("# btl = tcp\nbtl_tcp_if_include = lo\n")
    assert may_spare_ofi()
    path.write_text("osc = ^ucx\n btl = ^uct\n")
    assert not may_spare_ofi()


@pytest.mark.usefixtures("no_cards")
def test_settings_of_open_mpi_are_removed_from_the_environment():
    before = dict(os.environ)
    with settings_of_mpi():
        assert {**os.environ}.items() - before.items() == {("OMPI_MCA_btl", "^ofi")}
    assert dict(os.environ) == before


BY_OPENMPI = launched({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "4"})
BY_MPICH = launched({"PMI_RANK": "1", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1"})
BY_FLUX = launched({"FLUX_TASK_RANK": "1", "FLUX_JOB_SIZE": "4"})


@pytest.mark.parametrize(
    ("found", "size"),
    [
        (None, 1),
        (BY_OPENMPI, 4),
        (by_srun("pmix"), 4),
        (BY_MPICH, 8),
        (launched({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}), 1),
    ],
)
def test_a_world_that_fits_its_launcher_passes(found, size):
    check_world(found, size, [OPENMPI])


@pytest.mark.parametrize(
    ("found", "library", "fix"),
    [
        (by_srun("none"), OPENMPI, "srun --mpi=pmix"),
        (by_srun("none"), OPENMPI, "srun --mpi=none started 4 ranks"),
        (by_srun("pmi2"), OPENMPI, "srun --mpi=pmix"),
        (by_srun("none"), MPICH, "srun --mpi=pmi2"),
        (by_srun("none"), CRAY, "--mpi=cray_shasta"),
        (BY_FLUX, OPENMPI, "flux run -o pmi=pmix"),
        (BY_MPICH, OPENMPI, "hpctrain launch -n 4"),
        (BY_OPENMPI, MPICH, "hpctrain launch -n 4"),
        (BY_OPENMPI, OPENMPI, "unset it"),
    ],
)
def test_unconnected_rank_raises_with_library_launcher_and_remedy(found, library, fix):
    with pytest.raises(LaunchError) as error:
        check_world(found, 1, [library])
    text = str(error.value)
    assert str(library) in text
    assert found.name in text
    assert "4 ranks" in text
    assert fix in text


def test_a_foreign_mpirun_and_the_right_one_are_both_named(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/mpirun").touch()
    foreign = Path("/opt/mpich/bin/hydra_pmi_proxy")
    with pytest.raises(LaunchError) as error:
        check_world(BY_MPICH, 1, [tmp_path / "lib/libmpi.so.40"], foreign)
    assert str(foreign) in str(error.value)
    assert str(tmp_path / "bin/mpirun") in str(error.value)


@pytest.mark.parametrize("size", [1, 4])
def test_two_mpi_libraries_are_both_named(size):
    with pytest.raises(LaunchError) as error:
        check_world(BY_OPENMPI, size, [OPENMPI, MPICH])
    assert f"{OPENMPI} and {MPICH}" in str(error.value)


def world(*masks):
    facts = [RankFacts(host="vm", cores=mask) for mask in masks]
    return [Topology.from_facts(facts, rank) for rank in range(len(facts))]


def test_ranks_that_share_cores_are_warned_with_the_mask_and_in_the_same_words():
    (text,) = {core_warning(topology) for topology in world((0, 1), (0, 1), (0, 1))}
    assert "3 ranks share 2 cores of vm (mask 0-1)" in text
    assert {core_warning(topology) for topology in world((0,), (1,))} == {None}
    assert {core_warning(topology) for topology in world((0, 1), (0, 1))} == {None}


def accelerator_warnings(*seen: str, devices: int = 1, host: str = "vm") -> set[str | None]:
    facts = [RankFacts(host=host, cores=(0,), devices=devices, visible=one) for one in seen]
    elsewhere = RankFacts(host="elsewhere", cores=(0,), devices=devices, visible="7")
    return {accelerator_warning([*facts, elsewhere], rank) for rank in range(len(facts))}


def test_ranks_that_cannot_reach_each_others_accelerators_are_warned_in_the_same_words():
    (text,) = accelerator_warnings("0", "1", "2")
    assert "ranks of vm see different accelerators (0; 1; 2)" in text
    assert "srun --gpu-bind=none" in text
    assert accelerator_warnings("0,1", "0,1", devices=2) == {None}
    assert accelerator_warnings("0,1", "1,0", devices=2) == {None}
    assert accelerator_warnings("0") == {None}
    assert accelerator_warnings("", "", devices=0) == {None}


def test_ranks_that_share_accelerators_are_warned():
    (text,) = accelerator_warnings("", "")
    assert "but 2 ranks of vm share 1 accelerator;" in text
    (text,) = accelerator_warnings(*["0,1"] * 3, devices=2)
    assert "share 2 accelerators; start 2 on a node" in text


@pytest.mark.parametrize(
    ("cores", "sharing", "quota", "threads"),
    [
        (8, 1, None, 8),
        (8, 3, None, 2),
        (2, 4, None, 1),
        (64, 1, 4.0, 4),
        (64, 2, 4.0, 2),
        (4, 1, 0.5, 1),
        (1, 1, 8.0, 1),
    ],
)
def test_threads_are_the_cores_that_a_rank_really_has(cores, sharing, quota, threads):
    assert threads_for(cores, sharing, quota) == threads


@given(st.integers(1, 256), st.integers(1, 256))
def test_all_threads_of_a_node_fit_its_cores_or_each_rank_has_one(cores, ranks):
    threads = threads_for(cores, ranks)
    assert threads == 1 or threads * ranks <= cores


ALONE = "import hpctrain; hpctrain.init()"


@pytest.mark.launches
def test_init_stops_a_rank_that_its_launcher_did_not_reach():
    environ = mpiexec.environment(os.environ) | {
        "OMPI_COMM_WORLD_RANK": "1",
        "OMPI_COMM_WORLD_SIZE": "4",
    }
    done = ended([*preload.python(), "-c", ALONE], env=environ)
    assert done.returncode != 0
    assert "Open MPI mpirun" in done.stderr
    assert "OMPI_COMM_WORLD_SIZE=4" in done.stderr
    assert "libmpi" in done.stderr


@pytest.mark.launches
@pytest.mark.requires("foreign-mpich")
def test_init_stops_the_ranks_of_a_foreign_mpirun():
    foreign = Path(__file__).parents[2] / ".venv-mpich/bin/mpiexec"
    done = ended(
        [foreign, "-n", "2", sys.executable, "-c", ALONE],
        env=mpiexec.environment(),
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode != 0
    assert str(foreign.parent) in done.stderr
    assert "hpctrain launch -n 2" in done.stderr
