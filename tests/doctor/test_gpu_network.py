"""Check findings about networks of GPUs: the facts of a simulated node, and the remedies."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cluster.binding import GpuPlace
from hpctrain.core.units import GIB
from hpctrain.doctor.checks import gpu_network as checks
from hpctrain.doctor.checks.facts import (
    Adapter,
    DirectoryFacts,
    GpuNetworkFacts,
    StripeFacts,
)
from hpctrain.doctor.checks.table import examine
from hpctrain.doctor.host import gather_gpu_network as host
from hpctrain.launch import site as sites
from tests.doctor.healthy import BATCH, SLINGSHOT, SRUN, assert_judged, rows, with_

PLUGIN = Path("/opt/ofi/lib/libnccl-net.so")
CRAY = Path("/opt/cray/pe/lib64/libmpi_gnu.so.12.0.0")
MLX = Adapter(name="mlx5_0", family="infiniband", is_live=True)
PLACES = tuple(
    GpuPlace(vendor="amd", cores=tuple(range(first, first + 8))) for first in (48, 56, 16, 24)
)
CLEAN = GpuNetworkFacts(
    places=PLACES,
    interfaces=("hsn0", "hsn1", "lo", "nmn0"),
    plugins=(PLUGIN,),
    caches={Path("/tmp/triton"): "tmpfs"},
    stripes={Path("/scratch"): StripeFacts(count=8, largest_bytes=64 * GIB)},
    total_bytes=512 * GIB,
)
RANK = {**SRUN, "SLURM_LOCALID": "2", "SLURM_PROCID": "6"}


def node(environ=None, adapters=(SLINGSHOT,), mask=range(16, 24), mpi=None, **changes):
    """Return a rank or a job on a node with GPUs and Slingshot that has one fault."""
    facts = with_(environ, network={"adapters": tuple(adapters)}, cores={"mask": tuple(mask)})
    facts = replace(facts, gpu_network=replace(CLEAN, **changes))
    return replace(facts, mpi=replace(facts.mpi, library=mpi, reached=())) if mpi else facts


def scratch(count, size_bytes):
    return {"stripes": {Path("/scratch"): StripeFacts(count=count, largest_bytes=size_bytes)}}


def cached(folder, **environ):
    return node({**BATCH, **environ}, caches={Path(folder): "lustre"})


FINDINGS = {
    checks.check_gpu_network: [
        (node(plugins=()), "warning", "must have a libfabric plugin to use cxi0"),
        (
            node({"NCCL_NET": "AWS Libfabric"}, plugins=()),
            "warning",
            "no plugin of 'AWS Libfabric'",
        ),
        (node({"NCCL_SOCKET_IFNAME": "ib"}), "error", "NCCL_SOCKET_IFNAME must name an interface"),
        (
            node({"NCCL_SOCKET_IFNAME": "=hsn"}),
            "error",
            "hsn0, hsn1, lo, nmn0, got =hsn do: unset",
        ),
        (node({"NCCL_SOCKET_IFNAME": "^hsn,lo,nmn"}), "error", "got ^hsn,lo,nmn"),
        (node({"GLOO_SOCKET_IFNAME": "hsn"}), "error", "GLOO_SOCKET_IFNAME must name"),
        (node({"NCCL_IB_HCA": "mlx5"}), "error", "NCCL_IB_HCA must name an adapter"),
        (node({"UCX_NET_DEVICES": "mlx5_9:1"}), "error", "UCX_NET_DEVICES must name"),
        (node({"NCCL_IB_DISABLE": "1"}, [MLX]), "warning", "to use mlx5_0, but NCCL_IB_DISABLE=1"),
        (node({"NCCL_NET": "Socket"}), "warning", "but NCCL_NET=Socket: messages of GPUs use TCP"),
        (node({"NCCL_P2P_DISABLE": "1"}), "warning", "do: unset NCCL_P2P_DISABLE"),
        (node({"NCCL_SHM_DISABLE": "1"}), "warning", "do: unset NCCL_SHM_DISABLE"),
        (node({"CUDA_LAUNCH_BLOCKING": "1"}), "warning", "each call wait for its kernel"),
        (node({"HIP_LAUNCH_BLOCKING": "1"}), "warning", "do: unset HIP_LAUNCH_BLOCKING"),
        (
            node({"MPICH_GPU_SUPPORT_ENABLED": "1"}),
            "warning",
            "do: export MPICH_GPU_SUPPORT_ENABLED=0",
        ),
        (node({**BATCH, "NCCL_DEBUG": "INFO"}), "note", "do: export NCCL_DEBUG=WARN"),
        (
            node({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "4,5"}),
            "error",
            "must number the 2 GPUs of ROCR_VISIBLE_DEVICES=4,5 from 0, got 4,5",
        ),
        (with_({"GLOO_SOCKET_IFNAME": "ib0"}, gpu_network=GpuNetworkFacts()), "ok", "no GPUs"),
        (node({"NCCL_SOCKET_IFNAME": "hsn"}), "ok", str(PLUGIN)),
        (node({"NCCL_SOCKET_IFNAME": "^lo,nmn"}), "ok", ""),
        (node({"NCCL_SOCKET_IFNAME": "=hsn0,hsn1", "NCCL_NET": "OFI"}), "ok", ""),
        (node({"GLOO_SOCKET_IFNAME": "hsn0,hsn1"}), "ok", ""),
        (node({"NCCL_IB_HCA": "mlx5_0:1"}, [MLX], plugins=()), "ok", "none is needed"),
        (node({"MPICH_GPU_SUPPORT_ENABLED": "0", "NCCL_IB_DISABLE": "0"}), "ok", ""),
        (node({"ROCR_VISIBLE_DEVICES": "4,5", "HIP_VISIBLE_DEVICES": "0,1"}), "ok", ""),
    ],
    checks.check_gpu_places: [
        (
            node(RANK, mask=range(8)),
            "warning",
            "rank 6 uses cores 0-7 and GPU 2 next to cores 16-2",
        ),
        (node({**RANK, "ROCR_VISIBLE_DEVICES": "1"}), "warning", "GPU 1 next to cores 56-63"),
        (
            node({**RANK, "MPICH_OFI_NIC_POLICY": "NUMA"}, num_numa_nodes=4),
            "error",
            "may use cores of 4: MPI_Init fails do: bind ranks",
        ),
        (node({"MPICH_OFI_NIC_POLICY": "NUMA"}, num_numa_nodes=4), "note", "mpi4py before torch"),
        (node({**RANK, "MPICH_OFI_NIC_POLICY": "NUMA"}), "ok", "1 NUMA"),
        (node(RANK), "ok", ""),
        (node(mask=range(8)), "ok", ""),
    ],
    checks.check_srun_type: [
        (
            node({"SLURM_MPI_TYPE": "pmix"}, mpi=CRAY),
            "warning",
            "got pmix: each rank would be a separate world do: export SLURM_MPI_TYPE=cray_shasta",
        ),
        (node({"SLURM_MPI_TYPE": "cray_shasta"}, mpi=CRAY), "ok", ""),
        (node({**RANK, "SLURM_MPI_TYPE": "pmix"}, mpi=CRAY), "ok", ""),
    ],
    checks.check_caches: [
        (
            cached("/home/me/.triton/cache"),
            "warning",
            "export TRITON_CACHE_DIR=${TMPDIR:-/tmp}/trit",
        ),
        (cached("/home/me/.config/miopen"), "warning", "export MIOPEN_USER_DB_PATH="),
        (cached("/home/me/.cache/miopen"), "warning", "export MIOPEN_CUSTOM_CACHE_DIR="),
        (
            cached("/project/me/inductor", TORCHINDUCTOR_CACHE_DIR="/project/me/inductor"),
            "warning",
            "lock the same files do: export TORCHINDUCTOR_CACHE_DIR=",
        ),
        (node(BATCH), "ok", "on the node"),
        (node({}, caches={Path("/home/me"): "nfs"}), "ok", "no job"),
    ],
    checks.check_limits: [
        (node(BATCH, core_bytes=-1), "note", "core dumps are enabled (unlimited): 4 ranks"),
        (node(BATCH, huge_bytes=64 * GIB), "note", "torch and HDF5 cannot use this memory"),
        (node({}, core_bytes=-1), "ok", ""),
        (node(BATCH, huge_bytes=GIB), "ok", ""),
    ],
    checks.check_stripes: [
        (node(**scratch(1, 64 * GIB)), "note", "do: lfs setstripe -c 8 /scratch"),
        (node(**scratch(1, GIB)), "ok", ""),
        (node(**scratch(-1, 64 * GIB)), "ok", ""),
    ],
}
"""For each check: the facts, the level, and words of the finding and its remedy."""


@pytest.mark.parametrize(("check", "facts", "level", "words"), rows(FINDINGS))
def test_a_planted_fault_is_found_and_a_clean_node_has_none(check, facts, level, words):
    assert_judged(check, facts, level, words)


@pytest.mark.parametrize("environ", [{}, RANK])
def test_a_clean_node_with_slingshot_has_no_finding(environ):
    new = {"GPU network", "GPU places", "srun --mpi", "caches", "limits", "stripes"}
    found = [each for each in examine(node(environ, mpi=CRAY)) if each.check in new]
    assert {each.check for each in found} == new
    assert [each for each in found if each.level != "ok"] == []


LUMI = sites.find("lumi")
ADAPTERS = [replace(SLINGSHOT, name=f"cxi{number}") for number in range(4)]


@pytest.mark.parametrize(
    ("facts", "site", "levels", "words"),
    [
        (node({**BATCH, **LUMI.job.variables}, ADAPTERS[:3]), LUMI, "warning note", "8 GPUs"),
        (node(BATCH, ADAPTERS, places=PLACES * 2), LUMI, "note", "NCCL_SOCKET_IFNAME, NCCL_NET"),
        (node({**BATCH, **LUMI.job.variables}, ADAPTERS, places=PLACES * 2), LUMI, "ok", "as doc"),
        (node(BATCH, ADAPTERS, places=()), LUMI, "note", "8 GPUs, but this node has none"),
        (node({}, []), LUMI, "ok", "not compared with the profile of LUMI-G, CSC"),
        (node(BATCH), None, "ok", "unknown"),
    ],
)
def test_a_node_is_compared_with_the_profile_of_its_site(facts, site, levels, words):
    assert_judged(lambda each: checks.check_site(each, site), facts, levels, words)


def test_a_comparison_that_the_user_requests_outside_of_a_job_is_reported_as_not_made():
    found = checks.check_site(node({}, []), LUMI, "lumi")
    assert (found.level, found.what) == (
        "note",
        "not compared with the profile of LUMI-G, CSC: this is not a node of a job",
    )
    assert found.do.endswith("srun -N 1 -n 1 hpctrain doctor --site lumi")


def write(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_facts_are_gathered_from_a_tree_of_the_kernel(tmp_path, monkeypatch):
    gpu = {"vendor": "0x1002\n", "class": "0x038000\n"}
    pci = "sys/bus/pci/devices"
    write(
        tmp_path,
        {
            **{f"{pci}/0000:c1:00.0/{name}": text for name, text in gpu.items()},
            **{f"{pci}/0000:d1:00.0/{name}": text for name, text in gpu.items()},
            f"{pci}/0000:c1:00.0/local_cpulist": "48-50,112\n",
            f"{pci}/0000:e1:00.0/vendor": "0x1002\n",
            f"{pci}/0000:e1:00.0/class": "0x060400\n",  # a bridge
            "sys/devices/system/node/node0/cpulist": "0-15\n",
            "sys/devices/system/node/node1/cpulist": "16-31\n",
            "sys/devices/system/node/node2/cpulist": "32-47\n",
            "sys/class/net/hsn0/mtu": "9000",
            "proc/meminfo": "MemTotal: 1000 kB\nHugePages_Free:  3\nHugepagesize: 2048 kB\n",
            "lib/librccl-net.so": "",
            "shards/large": "12345",
            "bin/lfs": "#!/bin/sh\necho 1\n",
        },
    )
    (tmp_path / "bin/lfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    environ = {
        "LD_LIBRARY_PATH": f"/nowhere:{tmp_path / 'lib'}",
        "TRITON_CACHE_DIR": str(tmp_path / "not/yet"),
        "PATH": f"{tmp_path / 'bin'}",
    }
    tried = [DirectoryFacts(path=tmp_path / "shards", file_system="lustre")]
    found = host.gather(environ, tried, root=tmp_path, mask=range(8, 20))
    assert found.places == (
        GpuPlace(vendor="amd", cores=(48, 49, 50, 112)),
        GpuPlace(vendor="amd"),
    )
    assert found.interfaces == ("hsn0",)
    assert found.plugins == (tmp_path / "lib/librccl-net.so",)
    assert found.num_numa_nodes == 2
    assert found.caches[tmp_path / "not/yet"]
    assert len(found.caches) == 4
    assert found.stripes == {tmp_path / "shards": StripeFacts(count=1, largest_bytes=5)}
    assert (found.huge_bytes, found.total_bytes) == (3 * 2048 * 1024, 1000 * 1024)


def test_a_machine_without_gpus_has_no_caches_and_no_places(tmp_path):
    found = host.gather({}, root=tmp_path, mask=[0])
    assert (found.places, found.caches, found.stripes) == ((), {}, {})
    assert found.num_numa_nodes == 1
