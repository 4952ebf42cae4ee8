"""Check judgements of the facts of one process: the facts, the level, and words of the finding."""

from pathlib import Path

import pytest

from hpctrain.cluster.env import ranks_per_node
from hpctrain.cluster.resources import Room
from hpctrain.core.finding import Finding
from hpctrain.core.units import GIB, MIB
from hpctrain.doctor.checks import environment, gpus, job, network, node
from hpctrain.doctor.checks.check import few, merge
from hpctrain.doctor.checks.facts import Adapter, DirectoryFacts, Reached
from hpctrain.doctor.checks.table import examine
from tests.doctor.healthy import (
    ALONE,
    BATCH,
    HEALTHY,
    INFINIBAND,
    LIBRARY,
    MPICH,
    OLD,
    PCIE,
    SITE,
    SLINGSHOT,
    SRUN,
    assert_judged,
    rows,
    smi,
    with_,
)

DOWN = Adapter(name="mlx5_0", family="infiniband", is_live=False)
MPIRUN = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "6"}
LARGE = MPIRUN | {"OMPI_COMM_WORLD_SIZE": "10000", "OMPI_COMM_WORLD_LOCAL_SIZE": "64"}
EIGHT = {"SLURM_STEP_TASKS_PER_NODE": "8(x2)"}
REFUSED = "[Errno 1] Operation not permitted"
MODULE = (SITE, "mpirun", Path("/opt/openmpi/bin/mpirun"))
SYSTEM = (Path("/usr/lib/libmpi.so.40.30.4"), "mpirun", Path("/usr/bin/mpirun"))
INTEL = Path("/opt/intel/mpi/lib/libmpi.so.12.0.0")


def masks(facts):
    return node.check_masks([facts])


def threads(facts):
    return node.check_threads([facts])


def adapters(*found, **more):
    return {"network": {"adapters": found, **more}}


def mask(*numbers, granted=8, **more):
    return {"cores": {"mask": numbers, "num_granted": granted, **more}}


def files(most, **more):
    return {"limits": {"files": most, **more}}


def shm(free_bytes, **more):
    return {"memory": {"shm_free_bytes": free_bytes, **more}}


def beside(*others):
    found = [Reached(library=each[0], by=each[1], program=(*each, None)[2]) for each in others]
    return {"mpi": {"reached": (*HEALTHY.mpi.reached, *found)}}


def torch(version, **more):
    return {"versions": {"torch": version}, **more}


def directory(**facts):
    return {"directories": (DirectoryFacts(path=Path("/scratch"), **facts),)}


def room(left_bytes):
    return {"memory": {"rooms": (*HEALTHY.memory.rooms, Room((0, 1), "/job_7", left_bytes))}}


TABLE = {
    environment.check_versions: [
        ({}, {}, "ok", "python 3.11.7, hpctrain 0.1.0, torch 2.13.0, mpi4py 4.1.2"),
        ({}, {"versions": {"torch": "2.13.0", "h5py": None}}, "error", "pip install h5py"),
        ({}, {"versions": {"hpctrain": None}}, "note", "must be importable on all nodes"),
    ],
    environment.check_library: [
        ({}, {}, "ok", f"{LIBRARY}; under Slurm it needs `srun --mpi=pmix`"),
        ({}, {"mpi": {"library": MPICH, "reached": ()}}, "ok", "srun --mpi=pmi2"),
        ({}, {"mpi": {"error": "none; load a module"}}, "error", "none do: load a module"),
        ({}, beside((SITE, "LD_LIBRARY_PATH")), "warning", f"the pip package's {LIBRARY}"),
        ({}, beside((MPICH, "LD_LIBRARY_PATH")), "warning", f"MPI4PY_LIBMPI={MPICH}"),
        (
            {"MPI4PY_LIBMPI": "x"},
            beside((SITE, "LD_LIBRARY_PATH")),
            "note",
            "must load one MPI library",
        ),
        ({}, beside(MODULE), "warning", "/opt/openmpi/bin/mpirun, belongs to"),
        ({}, beside(MODULE, (SITE, "LD_LIBRARY_PATH")), "warning", "hpctrain launch"),
        ({}, beside(SYSTEM), "note", "/usr/bin/mpirun"),
        (SRUN, beside(MODULE), "ok", ""),  # irrelevant for ranks that already run
        (
            {},
            {
                "mpi": {
                    "library": INTEL,
                    "reached": (
                        Reached(
                            library=INTEL.parent / "release" / INTEL.name, by="LD_LIBRARY_PATH"
                        ),
                    ),
                }
            },
            "ok",
            "",
        ),
    ],
    environment.check_engines: [
        ({}, {}, "ok", "hpctrain horovod build"),
        ({}, {"versions": {"horovod": "0.28.1"}}, "ok", "Horovod 0.28.1 is installed"),
        ({}, {"horovod_error": "it says: no; build"}, "error", "it says: no do: build"),
    ],
    job.check_job: [
        ({}, {}, "ok", "no job"),
        (BATCH, {}, "ok", "slurm job 7, 2 nodes node[1-2], 4 tasks on this node"),
        (BATCH | {"SLURM_CPUS_PER_TASK": "4"}, {}, "ok note", "SRUN_CPUS_PER_TASK"),
        (BATCH | {"SLURM_CPUS_PER_TASK": "1"}, {}, "ok", ""),
        (BATCH | {"SLURM_CPUS_PER_TASK": "4", "SRUN_CPUS_PER_TASK": "4"}, {}, "ok", ""),
        (SRUN | {"SLURM_CPUS_PER_TASK": "4"}, {}, "ok", ""),
    ],
    job.check_launcher: [
        ({}, {}, "ok", "the only rank"),
        (SRUN, {}, "ok", "srun: rank 0 of 8 (SLURM_STEP_NUM_TASKS)"),
        (BATCH, {"mpi": {"srun_types": ("none", "pmi2", "pmix_v4")}}, "ok", "srun --mpi=pmix"),
        (BATCH, {"mpi": {"srun_types": ("pmi2", "cray_shasta")}}, "warning", "hpctrain launch"),
        (BATCH, {"mpi": {"srun_types": ("none", "pmi2"), "library": MPICH}}, "ok", ""),
        (BATCH, {"mpi": {"srun_types": ("none", "pmix"), "library": MPICH}}, "warning", "pmi2"),
    ],
    masks: [
        ({}, {}, "ok", "8 for each rank"),
        ({}, mask(5), "warning", "its 8 cores, but this process may use 1 of 8 cores (mask 5)"),
        ({}, mask(4, 5), "note", "2 of 8 cores"),
        (SRUN, mask(5), "warning", "use 1 of 8 cores (mask 5) do: srun --cpus-per-task"),
        (SRUN, mask(4, 5), "ok", ""),
        (SRUN | EIGHT, mask(5), "ok", ""),
        ({}, mask(5, granted=1), "ok", ""),
        (SRUN | {"SLURM_CPUS_PER_TASK": "4"}, mask(0, 1, granted=64), "warning", "srun"),
        (SRUN | {"SLURM_CPUS_PER_TASK": "2"}, mask(4, 5), "ok", ""),
        ({}, {"cores": {"quota": 2.5}}, "ok", "time for 2.5 of them"),
    ],
    threads: [
        ({}, {}, "ok", "8 for each rank"),
        (SRUN, {}, "ok", "2 for each rank"),
        (SRUN | {"OMP_NUM_THREADS": "2"}, {}, "ok", ""),
        (SRUN | {"OMP_NUM_THREADS": "8"}, {}, "warning", "export OMP_NUM_THREADS=2, or unset it"),
        (SRUN | {"OMP_NUM_THREADS": "8,2"}, {}, "warning", "threads would wait"),
        (
            SRUN | {"MKL_NUM_THREADS": "3"},
            {},
            "warning",
            "MKL_NUM_THREADS must be at most the cores of a rank, 2, got 3",
        ),
        (SRUN | {"OMP_NUM_THREADS": "1"}, {}, "note", "1 would be idle"),
        (SRUN | {"OMP_NUM_THREADS": "auto"}, {}, "ok", ""),
        (SRUN | {"OMP_NUM_THREADS": "4"}, mask(4, 5), "warning", "cores of a rank, 2, got 4"),
        (SRUN | EIGHT | {"OMP_NUM_THREADS": "1"}, {}, "ok", ""),
        ({"OMP_NUM_THREADS": "4"}, {"cores": {"quota": 2.5}}, "warning", "=2, or unset"),
        (
            {"OMP_NUM_THREADS": "16", "OPENBLAS_NUM_THREADS": "16"},
            {},
            "warning warning",
            "export OPENBLAS_NUM_THREADS=8",
        ),
    ],
    gpus.check_gpus: [
        ({}, {}, "ok", "0 in this machine"),
        (
            {"CUDA_VISIBLE_DEVICES": "0, 1,0"},
            {"gpus": {"num_devices": 2}},
            "error",
            "_DEVICES=0,1",
        ),
        (BATCH | {"SLURM_GPUS_ON_NODE": "2"}, {}, "warning", "4 tasks on this node share 2"),
        (BATCH | {"SLURM_JOB_GPUS": "0,1,2"}, {}, "warning", "share 3"),
        (BATCH | {"CUDA_VISIBLE_DEVICES": "0,1"}, {}, "warning", "--ntasks-per-node=2"),
        (BATCH | {"SLURM_GPUS_ON_NODE": "4"}, {}, "ok", ""),
        (BATCH | {"SLURM_GPUS_ON_NODE": "8"}, {}, "note", "some are idle"),
        (SRUN | {"SLURM_GPUS_ON_NODE": "1"}, {}, "ok", ""),  # ranks compare these themselves
        (
            {},
            torch("2.13.0+cpu", gpus={"num_devices": 4}),
            "warning",
            "the 4 GPUs, got 2.13.0+cpu",
        ),
        ({}, torch("2.13.0+cpu"), "ok", ""),
        ({}, torch("2.13.0+cu130", gpus={"num_devices": 4}), "ok", ""),
        ({"CUDA_VISIBLE_DEVICES": ""}, {"gpus": {"num_devices": 4}}, "note", "hides all 4 GPUs"),
        (
            {"CUDA_VISIBLE_DEVICES": "-1"},
            {"gpus": {"num_devices": 4}},
            "note",
            "unset CUDA_VISIBLE_DEVICES",
        ),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, {}, "ok", ""),
        ({}, smi(), "ok", "4 in this machine, driver 570.86.15 for CUDA up to 12.8"),
        ({}, smi(runtime="12.6.77"), "ok", ""),
        ({}, smi(runtime="13.0.48"), "error", "torch for CUDA 12"),
        ({}, smi() | torch("2.13.0+cu130"), "error", "needs CUDA 13, and the driver 570"),
        ({}, smi(cuda="", driver="", error="NVML: mismatch"), "warning", "NVML: mismatch do: a"),
    ],
    gpus.check_gpu_links: [
        ({}, {}, "ok", "no GPUs"),
        ({}, {"gpus": {"num_devices": 1}}, "ok", "nvidia-smi does not report them"),
        ({}, smi(), "ok", "between GPUs NVLink; to the nearest network adapter a PCIe switch (2 "),
        ({}, smi(), "ok", "and the link between the sockets (2 of 4); GPUDirect"),
        ({}, smi(topology=PCIE), "ok", "between GPUs PCIe through the processor; GPUDirect RDMA"),
        ({}, smi(topology=OLD), "ok", "a PCIe switch (1 of 3) and PCIe through the pro"),
        ({}, smi(has_peermem=True), "ok", "nvidia_peermem loaded"),
        (
            {},
            smi(topology=ALONE),
            "ok",
            "GPUDirect RDMA: nvidia_peermem not loaded, and not needed",
        ),
    ],
    node.check_room: [
        (SRUN, room(2 * GIB), "ok", "/job_7"),
        (SRUN, room(2 * GIB - 1), "warning", "2.0 GiB available in /job_7 for 4 ranks"),
        ({}, {"memory": {"rooms": ()}}, "ok", "memory is unknown"),
    ],
    node.check_shared_memory: [
        ({}, shm(64 * MIB), "warning", "--shm-size"),  # one rank for each of eight cores
        ({}, shm(128 * MIB), "ok", "memfd"),
        (SRUN, shm(64 * MIB), "ok", ""),
        (SRUN, shm(63 * MIB), "warning", "64.0 MiB for the messages of 4 ranks"),
        (SRUN, shm(16 * MIB) | {"mpi": {"library": MPICH}}, "ok", ""),
        (SRUN, shm(0), "warning", "SIGBUS"),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "1"}, shm(0), "ok", ""),
        ({}, shm(GIB, memfd_error=REFUSED), "warning", f"{REFUSED}: MPI sends the gradients"),
        ({"HPCTRAIN_SHARED_MEMORY": "memfd"}, shm(GIB, memfd_error="no"), "error", "=auto"),
        ({"HPCTRAIN_SHARED_MEMORY": "off"}, {}, "note", "are sent by MPI"),
        ({"HPCTRAIN_SHARED_MEMORY": "?"}, {}, "ok", ""),  # covered by another check
    ],
    network.check_adapters: [
        ({}, {}, "ok", "TCP is used"),
        ({"OMPI_MCA_pml": "ob1"}, {}, "ok", ""),
        ({}, adapters(INFINIBAND), "ok", "mlx5_0 are active"),
        ({"OMPI_MCA_pml": "ob1"}, adapters(DOWN), "note", "but mlx5_0 has none"),
        (
            {"OMPI_MCA_pml": "ob1"},
            adapters(INFINIBAND),
            "warning",
            "OMPI_MCA_pml=ob1 makes MPI use",
        ),
        ({"UCX_TLS": "tcp,sm"}, adapters(INFINIBAND), "warning", "do: unset UCX_TLS"),
        ({}, adapters(SLINGSHOT), "warning", "the Slingshot adapter cxi0"),
        ({}, adapters(SLINGSHOT) | {"mpi": {"is_wheel": False}}, "ok", ""),
    ],
    network.check_copies: [
        ({}, {}, "ok", ""),
        ({}, {"network": {"copy_error": "no"}}, "warning", "MPIR_CVAR_CH4_CMA_ENABLE=0"),
    ],
    environment.check_settings: [
        ({"HPCTRAIN_TIMEOUT": "soon"}, {}, "error", "HPCTRAIN_TIMEOUT must be a number"),
    ],
    node.check_limits: [
        ({}, {}, "ok", "any number of open files"),
        (LARGE, files(1024), "note", "`ulimit -n 10063` before the launch"),
        (LARGE, files(1024, most_files=4096), "note", "LimitNOFILE of slurmd"),
        (LARGE, files(255), "warning", "must be able to open 256 files for a run of 10000 ranks"),
        (LARGE, files(256), "note", "all-to-all operations over TCP"),
        (LARGE, {**files(256), **adapters(INFINIBAND)}, "ok", "256 open files (256 needed)"),
        (LARGE, {"limits": {"threads": 519}}, "warning", "ulimit -u 520"),
        (LARGE, {"limits": {"files": 100, "threads": 100}}, "warning warning", "520 threads"),
        (MPIRUN, files(68), "warning", "`ulimit -n 69`"),
        (SRUN, files(75), "warning", "--propagate=NOFILE"),
    ],
    environment.check_directories: [
        ({}, directory(file_system="ext4", free_bytes=GIB - 1), "note", "(ext4) has 1024.0 MiB"),
        ({}, directory(steps={"list": "ENOENT"}), "error", "mkdir -p"),
        ({}, directory(steps={"list": "", "write": "EROFS"}), "warning", "another directory"),
        ({}, directory(steps={"lock": "no", "hdf5 locked": "no"}), "warning", "USE_FILE_LOCKING"),
        ({}, directory(steps={"hdf5": "OSError: bad"}), "error", "HDF5 fails"),
        ({}, directory(hung="lock"), "error", "request of a file lock hangs"),
        ({}, directory(hung="list"), "error", "the step list hangs"),
    ],
}


@pytest.mark.parametrize(("check", "environ", "facts", "levels", "words"), rows(TABLE))
def test_facts_are_judged(check, environ, facts, levels, words):
    assert_judged(check, with_(environ, **facts), levels, words)


@pytest.mark.parametrize(
    ("environ", "count"),
    [
        ({}, None),
        (MPIRUN | {"OMPI_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        (SRUN, 4),
        (BATCH, 4),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3(x2),1", "SLURM_NODEID": "2"}, 1),
        (SRUN | {"SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "9"}, 3),
        ({"SLURM_TASKS_PER_NODE": "nonsense"}, None),
    ],
)
def test_ranks_of_a_node_are_read_from_launcher_and_scheduler(environ, count):
    assert ranks_per_node(environ) == count


@pytest.mark.parametrize(
    ("environ", "is_slow"),
    [
        ({"OMPI_MCA_pml": "ob1"}, True),
        ({"OMPI_MCA_btl": "tcp,self"}, True),
        ({"UCX_TLS": "tcp,self,sm"}, True),
        ({"FI_PROVIDER": "tcp"}, True),
        ({"FI_PROVIDER": "tcp;ofi_rxm"}, True),
        ({"I_MPI_OFI_PROVIDER": "sockets"}, True),
        ({"I_MPI_FABRICS": "shm:tcp"}, True),
        ({"OMPI_MCA_pml": "ucx", "OMPI_MCA_btl": "self,tcp"}, False),
        ({"OMPI_MCA_btl": "^openib"}, False),
        ({"UCX_TLS": "rc,sm,self"}, False),
        ({"UCX_TLS": "ib,tcp"}, False),
        ({"UCX_TLS": "^tcp"}, False),
        ({"UCX_TLS": "self,sm"}, False),
        ({"FI_PROVIDER": "verbs"}, False),
        ({"I_MPI_FABRICS": "shm:ofi"}, False),
        ({"OMPI_MCA_pml": ""}, False),
    ],
)
def test_variables_that_disable_a_fast_adapter_are_known(environ, is_slow):
    assert network.slow_settings(environ) == [f"{n}={v}" for n, v in environ.items() if is_slow]


def test_every_setting_is_reported_with_its_origin():
    environ = {"HPCTRAIN_TIMEOUT": "7", "HOROVOD_CYCLE_TIME": "5"}
    found = environment.check_settings(with_(environ))
    texts = [each.what for each in found if each.level == "ok"]
    assert "timeout = 7.0, from HPCTRAIN_TIMEOUT" in texts
    assert "cycle_s = 0.005, from HOROVOD_CYCLE_TIME" in texts
    assert "shared_memory = auto, the default" in texts
    assert len(texts) == len(found)


def test_variable_without_effect_is_reported():
    environ = {"HPCTRAIN_TIMEOUTS": "7", "HOROVOD_CMAKE": "/bin/cmake"}
    ours, theirs, *_ = environment.check_settings(with_(environ))
    assert (ours.level, theirs.level) == ("warning", "note")
    assert ours.do == "unset HPCTRAIN_TIMEOUTS: did you mean HPCTRAIN_TIMEOUT?"
    assert theirs.what == "HOROVOD_CMAKE has no effect in hpctrain"
    assert theirs.do == "see `hpctrain guide horovod-variables`"


@pytest.mark.parametrize(
    "facts",
    [
        HEALTHY,
        with_(SRUN),
        with_(BATCH),
        with_(SRUN, network={"adapters": (INFINIBAND,)}),
        with_(mpi={"srun_types": ("none", "pmi2", "pmix", "pmix_v4")}),
    ],
)
def test_a_healthy_machine_has_no_fault_and_every_check_says_so(facts):
    findings = examine(facts)
    assert {each.level for each in findings} == {"ok"}
    names = {each.check for each in examine(HEALTHY)}
    assert {each.check for each in findings} >= names - {"cores", "threads"}  # ranks compare these


def test_every_fault_has_a_remedy():
    broken = with_(
        {"OMP_NUM_THREADS": "99", "HPCTRAIN_NONSENSE": "1", "CUDA_VISIBLE_DEVICES": "0,0"},
        versions={"torch": None},
        mpi={"error": "no library; load a module"},
        cores={"mask": (3,)},
        memory={"shm_free_bytes": 1, "memfd_error": "refused", "rooms": ()},
        network={"adapters": (INFINIBAND,), "copy_error": "no"},
    )
    wrong = [each for each in examine(broken) if each.is_wrong]
    assert len(wrong) >= 8
    assert all(each.do for each in wrong)
    assert any(each.level == "error" for each in wrong)


def finding(level, what="x", check="c"):
    return Finding(check, level, what, "do" if level in ("warning", "error") else "")


def test_merged_findings_name_their_hosts_unless_all_have_them():
    bad, other = finding("error", "bad"), finding("warning", "other", "d")
    found = merge(
        [[bad, finding("ok", check="d")], [bad, other], [bad, other]], ["n0", "n1", "n1"]
    )
    assert found == [bad, finding("warning", "n1: other", "d")]


def test_merged_findings_of_equal_ranks_equal_those_of_one():
    findings = examine(HEALTHY)
    assert merge([findings] * 3, ["n0", "n1", "n2"]) == findings


def test_a_finding_of_a_thousand_hosts_is_short():
    hosts = [f"n{number}" for number in range(1000)]
    of_ranks = [[finding("ok")], *([finding("error")] for _ in hosts[1:])]
    (found,) = merge(of_ranks, hosts)
    assert found.what == "n1, n2, n3, n4 and 995 more: x"


def test_a_finding_of_all_hosts_does_not_name_hosts():
    assert merge([[finding("note")]] * 2, ["n0", "n0"]) == [finding("note")]


def test_a_fault_of_many_nodes_lists_a_few_nodes():
    assert few([finding("error")] * 4) == [finding("error")] * 4
    assert [each.what for each in few([finding("error")] * 9)][3:] == [
        "x",
        "5 more findings of this kind",
    ]
