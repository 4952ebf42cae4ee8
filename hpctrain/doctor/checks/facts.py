"""Facts about a process, its machine and all ranks: the input of the checks."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hpctrain.cluster.binding import GpuPlace
from hpctrain.cluster.env import Launched
from hpctrain.cluster.machine_load import MachineLoad
from hpctrain.cluster.resources import Room
from hpctrain.cluster.topology import Topology
from hpctrain.core.config import Settings
from hpctrain.core.finding import Finding
from hpctrain.core.units import format_ranks
from hpctrain.doctor.checks.check import listed


@dataclass(frozen=True, kw_only=True, slots=True)
class StripeFacts:
    """Striping of a Lustre directory."""

    count: int  # stripe count of new files
    largest_bytes: int  # size of the largest file in the directory


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuNetworkFacts:
    """Facts about the network of GPUs, compiler caches, striping, core dumps and huge pages."""

    places: tuple[GpuPlace, ...] = ()  # GPUs in the order of their PCI addresses
    interfaces: tuple[str, ...] = ()  # network interfaces of the kernel, such as ``hsn0``
    plugins: tuple[Path, ...] = ()  # network plugins of NCCL and RCCL in the library path
    num_numa_nodes: int = 1  # NUMA nodes whose cores are in the affinity mask of this process
    caches: Mapping[Path, str] = field(default_factory=dict)
    """Directories of compiled kernels, with the types of their file systems."""
    stripes: Mapping[Path, StripeFacts] = field(default_factory=dict)  # by directory
    core_bytes: int = 0  # limit of core dumps; -1 is unlimited
    huge_bytes: int = 0  # memory in reserved huge pages that no process uses
    total_bytes: int = 0  # memory of the machine


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """MPI library that other programs in this environment would load."""

    library: Path  # resolved path
    by: str  # how the programs find the library: ``LD_LIBRARY_PATH`` or ``mpirun``
    program: Path | None = None  # the ``mpirun`` in PATH that belongs to the library


@dataclass(frozen=True, kw_only=True, slots=True)
class MpiFacts:
    """The MPI library of a rank and other MPI libraries on the machine."""

    library: Path | None = None
    """File that mpi4py loads; None if loading failed or was not tried."""
    error: str = ""  # why mpi4py cannot load a library
    reached: tuple[Reached, ...] = ()  # libraries that other programs would load
    is_wheel: bool = False  # whether a Python package contains the library
    srun_types: tuple[str, ...] = ()
    """Output of ``srun --mpi=list``; empty without srun."""
    thread_level: str = "MULTIPLE"  # the level that MPI provides to a rank


@dataclass(frozen=True, kw_only=True, slots=True)
class CoreFacts:
    """The cores that this process may use."""

    mask: tuple[int, ...] = (0,)  # hardware threads in the affinity mask
    quota: float | None = None  # CPU limit of the control group, in cores
    num_granted: int = 1
    """Cores of the machine that the job may use, according to scheduler and kernel."""
    num_siblings: int = 1  # hardware threads of a core
    load: MachineLoad | None = None  # load of the machine; None in a rank of a launch


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryFacts:
    """Memory of the node, and the support for shared memory."""

    rooms: tuple[Room, ...] = ()  # limits that apply to this process
    shm_bytes: int = 0  # size of /dev/shm; 0 if it does not exist
    shm_free_bytes: int = 0
    memfd_error: str = ""  # why anonymous shared memory is unavailable; empty if it is available
    kernel_error: str = ""  # why sums run without compiled code; empty if they use compiled code
    vector_bytes: int = 0  # width of the vectors of the compiled code


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """The NVIDIA GPUs of a machine, as nvidia-smi reports them."""

    num_devices: int = 0  # device files that this process may open
    driver: str = ""  # version of the driver
    cuda: str = ""  # newest version of CUDA that the driver supports
    runtime: str = ""  # version of the CUDA runtime that was installed with torch
    error: str = ""  # why nvidia-smi reports nothing
    uuids: tuple[str, ...] = ()
    topology: str = ""  # output of ``nvidia-smi topo -m``
    has_peermem: bool = False  # whether network adapters may access GPU memory (GPUDirect RDMA)


@dataclass(frozen=True, kw_only=True, slots=True)
class VisibleGpus:
    """The GPUs that one rank may use."""

    names: tuple[str, ...] = ()  # names that identify the same GPU in all ranks of a host
    by_torch: bool = False  # True if torch reported the names, False if the environment did
    no_peers: tuple[tuple[int, int], ...] = ()
    """Pairs of GPUs that cannot access each other's memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """A fast network adapter."""

    name: str  # such as ``mlx5_0``
    family: str  # its folder in /sys/class: ``infiniband`` or ``cxi``
    is_live: bool  # whether a port is active
    speaks_ethernet: bool = False  # whether the adapter is an Ethernet adapter with RoCE

    @property
    def is_fast(self) -> bool:
        """True if the adapter is active and belongs to a network other than Ethernet."""
        return self.is_live and not self.speaks_ethernet


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkFacts:
    """Fast network adapters, and kernel features that MPI uses."""

    adapters: tuple[Adapter, ...] = ()
    copy_error: str = ""  # why the kernel refuses process_vm_readv; empty if it permits the call


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectoryFacts:
    """Result of a trial of file operations in a directory."""

    path: Path
    file_system: str = ""  # type of the file system, such as ``nfs4`` or ``lustre``
    free_bytes: int = 0
    steps: Mapping[str, str] = field(default_factory=dict)
    """Error text of each completed step, empty if the step succeeded. The steps are ``list``,
    ``write``, ``lock``, ``hdf5`` and ``hdf5 locked``, in this order."""
    hung: str = ""  # the step that exceeded its time limit


@dataclass(frozen=True, kw_only=True, slots=True)
class LimitFacts:
    """Limits of this process; a limit that does not exist is infinite."""

    files: float = math.inf  # open files
    most_files: float = math.inf  # hard limit, up to which the process may raise ``files``
    threads: float = math.inf  # threads of the user, or of the container


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """Facts about one process and its machine: input of the checks of a process."""

    environ: Mapping[str, str]  # environment variables of the process
    host: str = ""
    place: str = ""  # system, processor, C library and environment
    versions: Mapping[str, str | None]
    """Versions of Python and of packages by name, None for a missing package."""
    mpi: MpiFacts
    cores: CoreFacts
    memory: MemoryFacts
    network: NetworkFacts
    limits: LimitFacts = LimitFacts()
    horovod_error: str = ""
    """Reason why the requested engine Horovod cannot be loaded, and the remedy; else empty."""
    gpus: GpuFacts = GpuFacts()
    visible: VisibleGpus = VisibleGpus()
    gpu_network: GpuNetworkFacts = field(default_factory=GpuNetworkFacts)
    directories: tuple[DirectoryFacts, ...] = ()  # directories that the user named


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredLink:
    """Latency, bandwidth and clock difference between two ranks."""

    ranks: tuple[int, int]  # the measuring rank and its partner
    latency_s: float  # minimum time of a small message in one direction
    bytes_per_s: float  # maximum bandwidth of large messages
    sent_bytes: int = 0  # approximate bytes sent in each direction
    clock_s: float = 0.0  # clock of the second rank minus clock of the first rank
    clock_error_s: float = 0.0  # bound of the error of ``clock_s``

    def with_best_of(self, other: "MeasuredLink") -> "MeasuredLink":
        """Combine two measurements of a link: the lower latency and the higher bandwidth."""
        return replace(
            self,
            latency_s=min(self.latency_s, other.latency_s),
            bytes_per_s=max(self.bytes_per_s, other.bytes_per_s),
            sent_bytes=self.sent_bytes + other.sent_bytes,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """Bytes that one host sent during the measurements, by interface."""

    host: str
    sent_bytes: int  # approximate bytes that this program sent to other nodes
    by_interface: Mapping[str, int]  # bytes sent by interfaces of the kernel, such as Ethernet
    by_adapter: Mapping[str, int]  # bytes sent by InfiniBand and similar adapters
    fast_adapters: tuple[str, ...] = ()  # fast adapters of the host, with or without counters


@dataclass(frozen=True, kw_only=True, slots=True)
class TrafficFacts:
    """Measured links between ranks, and bytes sent by each node."""

    inside: Sequence[MeasuredLink] = ()  # for each node, a link between two of its ranks
    between: Sequence[MeasuredLink] = ()  # links between nodes, measured by their first ranks
    carried: Sequence[Carried] = ()  # bytes that each node sent during the measurements


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldFacts:
    """Facts about all ranks: input of the checks of a launch.

    A single process is a world of one rank.
    """

    ranks: Sequence[Facts]
    topology: Topology
    launched: Launched | None = None  # variables of the launcher of rank 0
    mpi: str = "no MPI"  # name and version of the MPI library
    settings: Settings = field(default_factory=Settings)  # settings of rank 0, used by all
    engine: str = "hpctrain"  # engine that moves tensors
    node_memory: str = "alone"  # how the ranks of a node share memory according to the plan
    overlap: str = "end"  # when gradients are sent according to the plan
    notes: Sequence[str] = ()  # warnings that rank 0 got while the ranks connected
    nccl: tuple[str, str] = ("", "")
    """Version of NCCL in the torch of rank 0; reason why NCCL cannot sum over all ranks, or ""."""
    obstacles: Sequence[Finding] = ()  # requested features that are not available
    plan: Sequence[str] = ()  # the plan and its measurements, in sentences
    traffic: TrafficFacts = TrafficFacts()

    @property
    def host_of(self) -> dict[int, str]:
        """Host name of each node; the key is the first rank of the node."""
        nodes = zip(self.topology.nodes, self.topology.hosts, strict=True)
        return {ranks[0]: host for ranks, host in nodes}


def by_host(ranks: Sequence[Facts]) -> dict[str, list[int]]:
    """Return the ranks of each host."""
    found: dict[str, list[int]] = {}
    for rank, facts in enumerate(ranks):
        found.setdefault(facts.host, []).append(rank)
    return found


def differences(values: Sequence[Mapping[str, str | None]]) -> Iterator[tuple[str, str]]:
    """Yield each name that has different values on different ranks, and a text with all values.

    ``values[rank]`` maps names to the values on ``rank``. The text names the ranks of each value.
    """
    for name in dict.fromkeys(name for of_rank in values for name in of_rank):
        ranks_of: dict[str, list[int]] = {}
        for rank, of_rank in enumerate(values):
            ranks_of.setdefault(of_rank.get(name) or "not set", []).append(rank)
        if len(ranks_of) > 1:
            texts = [f"{value} ({format_ranks(ranks)})" for value, ranks in ranks_of.items()]
            yield name, listed(texts)
