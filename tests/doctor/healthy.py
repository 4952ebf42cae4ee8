"""Provide facts of a healthy machine, into which tests insert faults."""

from dataclasses import replace
from pathlib import Path

import pytest

from hpctrain.cluster.resources import Room
from hpctrain.core.units import GIB
from hpctrain.doctor.checks.check import named
from hpctrain.doctor.checks.facts import (
    Adapter,
    CoreFacts,
    Facts,
    GpuFacts,
    MemoryFacts,
    MpiFacts,
    NetworkFacts,
    Reached,
)

LIBRARY = Path("/venv/lib/libmpi.so.40")
SITE = Path("/opt/openmpi/lib/libmpi.so.40.30.6")
MPICH = Path("/opt/mpich/lib/libmpi.so.12.5.0")
INFINIBAND = Adapter(name="mlx5_0", family="infiniband", is_live=True)
SLINGSHOT = Adapter(name="cxi0", family="cxi", is_live=True)

HEALTHY = Facts(
    environ={},
    versions={"python": "3.11.7", "hpctrain": "0.1.0", "torch": "2.13.0", "mpi4py": "4.1.2"},
    mpi=MpiFacts(
        library=LIBRARY,
        reached=(Reached(library=LIBRARY, by="mpirun", program=Path("/venv/bin/mpirun")),),
        is_wheel=True,
    ),
    cores=CoreFacts(mask=tuple(range(8)), num_granted=8),
    memory=MemoryFacts(
        rooms=(Room((0, 0), "this machine", 64 * GIB),),
        shm_bytes=32 * GIB,
        shm_free_bytes=31 * GIB,
    ),
    network=NetworkFacts(),
)

NVLINK = """
\tGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tNV18\tNV18\tPIX\tSYS\t0-3,8-11\t0\t\tN/A
GPU1\tNV18\t X \tNV18\tNV18\tNODE\tPIX\t0-3,8-11\t0\t\tN/A
GPU2\tNV18\tNV18\t X \tNV18\tSYS\tSYS\t4-7,12-15\t1\t\tN/A
GPU3\tNV18\tNV18\tNV18\t X \tSYS\tSYS\t4-7,12-15\t1\t\tN/A
NIC0\tPIX\tNODE\tSYS\tSYS\t X \tSYS
NIC1\tSYS\tPIX\tSYS\tSYS\tSYS\t X

Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
  NIC1: mlx5_1
"""
PCIE = """
\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tPHB\t0-63\t0\t\tN/A
GPU1\tPHB\t X \t0-63\t0\t\tN/A
"""
OLD = """
        GPU0    GPU1    GPU2    mlx4_0  CPU Affinity
GPU0     X      PIX     PHB     PHB     0-9,20-29
GPU1    PIX      X      PHB     PHB     0-9,20-29
GPU2    PHB     PHB      X      SYS     10-19,30-39
"""
ALONE = """
\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \t0-15\t0\t\tN/A
"""
"""What ``nvidia-smi topo -m`` prints, of four machines."""

SRUN = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2)",
    "SLURM_NODEID": "0",
}
"""A rank of a step of two nodes with four tasks each."""

BATCH = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_TASKS_PER_NODE": "4(x2)",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
}
"""The script of such a job."""


def smi(**output):
    """Return the facts of a machine with four GPUs, as nvidia-smi reports them."""
    uuids = tuple(f"GPU-{number}" for number in "abcd")
    usual = {"driver": "570.86.15", "cuda": "12.8", "topology": NVLINK, "uuids": uuids}
    return {"gpus": GpuFacts(num_devices=4, **usual | output)}


def with_(environ=None, **changes):
    """Return the healthy machine with another environment and other facts.

    A dict such as ``memory={"shm_free_bytes": 0}`` changes fields of a fact. Any other value
    replaces the fact.
    """
    parts = {
        name: replace(getattr(HEALTHY, name), **change)
        if isinstance(change, dict) and name != "versions"
        else change
        for name, change in changes.items()
    }
    return replace(HEALTHY, environ=environ or {}, **parts)


def rank(host="a", **changes):
    """Return a rank of the healthy machine."""
    return with_(host=host, **changes)


def rows(table):
    """Return the rows of all checks in a table as parameters of pytest."""
    return [
        pytest.param(check, *row, id=f"{check.__name__}-{number}")
        for check, found in table.items()
        for number, row in enumerate(found)
    ]


def assert_judged(check, facts, levels, words):
    """Assert the levels of a check's findings, and words in the last finding."""
    found = named("a check", check(facts))
    assert " ".join(each.level for each in found) == levels
    assert all(each.do for each in found if each.is_wrong)
    assert not found or words in f"{found[-1].what} do: {found[-1].do}"
