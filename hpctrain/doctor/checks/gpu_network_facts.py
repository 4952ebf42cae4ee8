"""Facts about GPUs, their network and the caches of their compilers: input of its checks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hpctrain.cluster.binding import GpuPlace


@dataclass(frozen=True, kw_only=True, slots=True)
class StripeFacts:
    """Striping of a Lustre directory."""

    count: int  # stripe count of new files
    largest_bytes: int  # size of the largest file in the directory


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuNetworkFacts:
    """What GPUs need to communicate between nodes."""

    places: tuple[GpuPlace, ...] = ()  # GPUs in the order of their PCI addresses
    interfaces: tuple[str, ...] = ()  # network interfaces of the kernel, such as ``hsn0``
    plugins: tuple[Path, ...] = ()  # network plugins of NCCL and RCCL in the library path
    num_numa_nodes: int = 1  # NUMA nodes whose cores are in the affinity mask of this process
    caches: Mapping[Path, str] = field(default_factory=dict)
    """Directories of compiled kernels, with the types of their file systems."""
    stripes: Mapping[Path, StripeFacts] = field(default_factory=dict)  # of requested directories
    core_bytes: int = 0  # limit of core dumps; -1 is unlimited
    huge_bytes: int = 0  # memory in reserved huge pages that no process uses
    total_bytes: int = 0  # memory of the machine
