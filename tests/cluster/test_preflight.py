import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.cluster.env import launched
from hpctrain.cluster.preflight import check_world, core_warning, threads_for
from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.core.errors import LaunchError
from hpctrain.launch import mpiexec
from tests.harness import preload
from tests.processes import ended

OPENMPI = Path("/nowhere/lib/libmpi.so.40")
MPICH = Path("/elsewhere/lib/libmpi.so.12")
CRAY = Path("/opt/cray/lib/libmpi_cray.so.12")


def by_srun(pmi):
    return launched(
        {
            "SLURM_STEP_ID": "0",
            "SLURM_STEP_NUM_TASKS": "4",
            "SLURM_PROCID": "1",
            "SLURM_MPI_TYPE": pmi,
        }
    )


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
def test_a_lonely_rank_is_told_library_launcher_and_remedy(found, library, fix):
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
    assert "3 ranks take turns on 2 cores of vm (mask 0-1)" in text
    assert {core_warning(topology) for topology in world((0,), (1,))} == {None}
    assert {core_warning(topology) for topology in world((0, 1), (0, 1))} == {None}


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
    assert "LaunchError" in done.stderr
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
