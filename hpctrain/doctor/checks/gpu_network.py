"""Checks of the network that GPUs use, of the cores next to GPUs, of caches and file systems."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from hpctrain.cluster.binding import gpu_of
from hpctrain.cluster.env import job_id, launched, ranks_per_node, visible_devices
from hpctrain.cluster.libraries import srun_type
from hpctrain.core.finding import Finding
from hpctrain.core.units import GIB, format_bytes, format_numbers, plural
from hpctrain.doctor.checks.check import Found, error, note, ok, warning
from hpctrain.doctor.checks.facts import Facts
from hpctrain.launch.site import SiteProfile

LARGE_BYTES = 4 * GIB  # files of this size are read faster from several storage targets of Lustre
HUGE_FRACTION = 0.05  # huge pages are reported if they are a larger fraction of the memory

_SHARED = ("nfs", "lustre", "gpfs", "ceph", "beegfs", "panfs", "wekafs", "fuse", "smb", "afs")
"""Types of file systems that all nodes share; a type may have a suffix, such as ``nfs4``."""

_ON = ("1", "true", "yes", "on")


def has_gpus(facts: Facts) -> bool:
    """Return True if this machine has GPUs of NVIDIA or AMD."""
    return bool(facts.gpus.num_devices or facts.gpu_network.places)


def check_gpu_network(facts: Facts) -> Found:
    """Report a missing network plugin, and variables that slow down or stop NCCL and RCCL."""
    if not has_gpus(facts):
        return [*_names(facts)] or ok("no GPUs")
    found = [*_plugin(facts), *_names(facts), *_switches(facts), *_gpu_numbers(facts)]
    plugins = ", ".join(str(each) for each in facts.gpu_network.plugins[:1])
    return found or ok(f"plugin {plugins}" if plugins else "no plugin, and none is needed")


def _plugin(facts: Facts) -> Iterator[Finding]:
    """Report a missing network plugin if Slingshot needs one or NCCL_NET requests one."""
    if facts.gpu_network.plugins:
        return
    do = (
        "load the module of the site, such as rccl-net-plugin or aws-ofi-nccl, or add the folder "
        "of libnccl-net.so to LD_LIBRARY_PATH"
    )
    if (net := facts.environ.get("NCCL_NET", "")) and net not in ("IB", "Socket"):
        what = f"NCCL_NET must name an available network, but no plugin of {net!r} is found"
        yield warning(f"{what}: NCCL fails to start", do)
    elif adapters := [a.name for a in facts.network.adapters if a.family == "cxi" and a.is_live]:
        what = f"NCCL and RCCL must have a libfabric plugin to use {adapters[0]}, but find none"
        yield warning(f"{what}: messages of GPUs use TCP", do)


def _names(facts: Facts) -> Iterator[Finding]:
    """Report each variable that names a network interface or adapter that does not exist."""
    environ, interfaces = facts.environ, facts.gpu_network.interfaces
    adapters = [each.name for each in facts.network.adapters]
    for name, there, is_exact in (
        ("NCCL_SOCKET_IFNAME", interfaces, False),
        ("GLOO_SOCKET_IFNAME", interfaces, True),
        ("NCCL_IB_HCA", adapters, False),
        ("UCX_NET_DEVICES", (*interfaces, *adapters, "all"), True),
    ):
        text = environ.get(name, "")
        if text and there and not _selects(text, there, is_exact=is_exact):
            kind = "adapter" if name == "NCCL_IB_HCA" else "interface"
            what = f"{name} must name an {kind} of this node, which has {', '.join(there)}"
            yield error(f"{what}, got {text}", f"unset {name}, or name one of them")


def _selects(text: str, there: Iterable[str], *, is_exact: bool) -> bool:
    """Return True if ``text``, the value of a variable, selects a name of ``there``.

    NCCL accepts prefixes of names, ``=`` before exact names, and ``^`` before names to exclude. A
    colon separates the name of an adapter from a port.
    """
    excludes, is_exact = text.startswith("^"), is_exact or "=" in text[:2]
    words = [word.partition(":")[0] for word in text.lstrip("^=").split(",")]
    selected = [
        name
        for name in there
        if any(name == word if is_exact else name.startswith(word) for word in words)
    ]
    return len(selected) < len([*there]) if excludes else bool(selected)


def _switches(facts: Facts) -> Iterator[Finding]:
    """Report variables that disable a fast path, or that stop MPI or NCCL."""
    environ, live = facts.environ, [each.name for each in facts.network.adapters if each.is_fast]
    fast = live[0] if live else ""
    slow = "messages of GPUs use TCP"
    through_host = "GPUs of a node send messages through the host"
    for name, values, applies, effect in (
        ("NCCL_IB_DISABLE", _ON, bool(fast), f"NCCL must be free to use {fast}, but {{}}: {slow}"),
        (
            "NCCL_NET",
            ("socket",),
            bool(fast),
            f"NCCL must be free to use {fast}, but {{}}: {slow}",
        ),
        ("NCCL_P2P_DISABLE", _ON, True, f"GPUs must access each other, but {{}}: {through_host}"),
        ("NCCL_SHM_DISABLE", _ON, True, f"NCCL must use shared memory, but {{}}: {slow}"),
        ("CUDA_LAUNCH_BLOCKING", _ON, True, _BLOCKING),
        ("HIP_LAUNCH_BLOCKING", _ON, True, _BLOCKING),
        (
            "MPICH_GPU_SUPPORT_ENABLED",
            _ON,
            True,
            _CRAY_GPUS,
        ),
    ):
        if applies and environ.get(name, "").lower() in values:
            what = effect.format(f"{name}={environ[name]}")
            off = f"export {name}=0" if name.startswith("MPICH") else f"unset {name}"
            yield warning(what, off)
    if environ.get("NCCL_DEBUG", "").upper() in ("INFO", "TRACE") and job_id(environ):
        what = f"NCCL_DEBUG={environ['NCCL_DEBUG']}: each rank writes pages into the output"
        yield note(what, "export NCCL_DEBUG=WARN")


_CRAY_GPUS = (
    "Cray MPICH must not access GPUs while NCCL or RCCL does, but {} permits this: the processes "
    "can block each other, and MPI fails without Cray's library for GPUs"
)
_BLOCKING = "kernels must overlap with other work, but {} makes each call wait for its kernel"


def _gpu_numbers(facts: Facts) -> Iterator[Finding]:
    """Report GPU indices of HIP_VISIBLE_DEVICES that ROCR_VISIBLE_DEVICES makes invalid."""
    environ = facts.environ
    rocr, hip = (environ.get(f"{name}_VISIBLE_DEVICES", "") for name in ("ROCR", "HIP"))
    numbers = [int(word) for word in hip.split(",") if word.strip().isdigit()]
    count = len(rocr.split(","))
    if rocr and numbers and max(numbers) >= count:
        what = (
            f"HIP_VISIBLE_DEVICES must number the {count} GPUs of ROCR_VISIBLE_DEVICES={rocr} "
            f"from 0, got {hip}"
        )
        yield error(what, "unset HIP_VISIBLE_DEVICES")


def check_gpu_places(facts: Facts) -> Found:
    """Report a rank whose cores are far from its GPU, or with whose cores Cray MPICH fails."""
    found = [*_far(facts), *_policy(facts)]
    near = [
        f"GPU {number} next to cores {format_numbers(place.cores)}"
        for number, place in enumerate(facts.gpu_network.places)
        if place.cores
    ]
    own = f"cores of {plural(facts.gpu_network.num_numa_nodes, 'NUMA node')}"
    return found or ok("; ".join([own, *near]))


def _far(facts: Facts) -> Iterator[Finding]:
    """Report this rank if its AMD GPU and its cores are in different NUMA nodes."""
    places = [each for each in facts.gpu_network.places if each.vendor == "amd"]
    rank = launched(facts.environ)
    if not places or rank is None or rank.local_rank is None:
        return
    name = gpu_of(rank.local_rank, len(places), facts.environ)
    place = places[int(name)] if name.isdigit() and int(name) < len(places) else None
    if place is not None and place.cores and not {*place.cores} & {*facts.cores.mask}:
        what = (
            f"a rank must use the cores next to its GPU, but rank {rank.rank} uses cores "
            f"{format_numbers(facts.cores.mask)} and GPU {name} next to cores "
            f"{format_numbers(place.cores)}"
        )
        yield warning(what, "bind as in the profile of the site: `hpctrain submit --site NAME`")


def _policy(facts: Facts) -> Iterator[Finding]:
    nodes = facts.gpu_network.num_numa_nodes
    if facts.environ.get("MPICH_OFI_NIC_POLICY", "").upper() == "NUMA" and nodes > 1:
        what = (
            f"a rank must use the cores of one NUMA node for MPICH_OFI_NIC_POLICY=NUMA, but may "
            f"use cores of {nodes}: MPI_Init fails"
        )
        do = (
            "bind ranks to cores by srun --cpus-per-task and --cpu-bind, and import mpi4py before "
            "torch; or unset MPICH_OFI_NIC_POLICY"
        )
        yield error(what, do) if launched(facts.environ) else note(what, do)


def check_srun_type(facts: Facts) -> Found:
    """Report a SLURM_MPI_TYPE that this MPI does not support: ranks would be separate worlds."""
    library, text = facts.mpi.library, facts.environ.get("SLURM_MPI_TYPE", "")
    if library is None or not text or launched(facts.environ):
        return ok("SLURM_MPI_TYPE is not set")
    needed = srun_type(library)
    if text.startswith(needed):
        return ok(f"SLURM_MPI_TYPE={text}")
    what = f"SLURM_MPI_TYPE must be {needed} for {library}, got {text}"
    return warning(
        f"{what}: each rank would be a separate world", f"export SLURM_MPI_TYPE={needed}"
    )


def check_caches(facts: Facts) -> Found:
    """Report directories of compiled kernels on a file system that all nodes share."""
    if not job_id(facts.environ):
        return ok("no job")
    shared = {
        path: kind
        for path, kind in facts.gpu_network.caches.items()
        if kind.lower().startswith(_SHARED)
    }
    do = "export {}=${{TMPDIR:-/tmp}}/{}-$USER, on a disk of each node"
    return [
        warning(
            f"compiled kernels must be stored on each node, but {path} is on {kind}: all ranks "
            f"read, write and lock the same files",
            do.format(variable, variable.partition("_")[0].lower()),
        )
        for path, kind in shared.items()
        for variable in [_cache_variable(path, facts.environ)]
    ] or ok("on the node")


def _cache_variable(path: Path, environ: Mapping[str, str]) -> str:
    names = {
        "triton": "TRITON_CACHE_DIR",
        ".config/miopen": "MIOPEN_USER_DB_PATH",
        "miopen": "MIOPEN_CUSTOM_CACHE_DIR",
    }
    set_to = (name for name in (*names.values(), _INDUCTOR) if environ.get(name) == str(path))
    usual = (name for word, name in names.items() if word in str(path))
    return next(set_to, next(usual, _INDUCTOR))


_INDUCTOR = "TORCHINDUCTOR_CACHE_DIR"


def check_limits(facts: Facts) -> Found:
    """Report enabled core dumps, and memory in reserved huge pages, which torch cannot use."""
    network, found = facts.gpu_network, []
    ranks = ranks_per_node(facts.environ) or 1
    if network.core_bytes and ranks > 1:
        size = "unlimited" if network.core_bytes < 0 else format_bytes(network.core_bytes)
        what = (
            f"core dumps are enabled ({size}): {ranks} ranks of a node write files if they crash"
        )
        found.append(note(what, "ulimit -c 0 in the job script"))
    if network.huge_bytes > HUGE_FRACTION * network.total_bytes:
        what = f"{format_bytes(network.huge_bytes)} are reserved in huge pages that nothing uses"
        do = "unload modules such as craype-hugepages2M; else ask the site"
        found.append(note(f"{what}: torch and HDF5 cannot use this memory", do))
    return found or ok("no core dumps, no reserved huge pages")


def check_stripes(facts: Facts) -> Found:
    """Report large files in Lustre directories that store each file on one storage target."""
    return [
        note(
            f"a file of {format_bytes(each.largest_bytes)} in {path} should be on several storage "
            f"targets of Lustre, but the stripe count of the directory is 1",
            f"lfs setstripe -c 8 {path}, then copy the files; or pack smaller shards",
        )
        for path, each in facts.gpu_network.stripes.items()
        if each.count == 1 and each.largest_bytes >= LARGE_BYTES
    ] or ok("no large files on one target")


def check_site(facts: Facts, site: SiteProfile | None, given: str | None = None) -> Found:
    """Report differences between a node of a job and the profile of its site.

    ``given`` is the argument of --site, by which the user requests the comparison.
    """
    if site is None:
        return ok("unknown; hpctrain site list shows the profiles")
    if not job_id(facts.environ):
        what = f"not compared with the profile of {site.label}: this is not a node of a job"
        do = f"in a job: srun -N 1 -n 1 hpctrain doctor --site {given}"
        return note(what, do) if given else ok(what)
    if site.node.gpus and not has_gpus(facts):
        what = (
            f"a node of {site.label} has {plural(site.node.gpus, 'GPU')}, but this node has none"
        )
        return note(what, f"request a node of {site.label} with GPUs, or use --site none")
    live = sum(each.is_live for each in facts.network.adapters)
    gpus = facts.gpus.num_devices or len(facts.gpu_network.places)
    found = []
    if live < site.node.adapters:
        what = (
            f"a node of {site.label} has {site.node.adapters} adapters, but {live} are active here"
        )
        found.append(warning(what, f"report {facts.host} to the site"))
    if gpus < site.node.gpus and not visible_devices(facts.environ):
        what = f"a node of {site.label} has {site.node.gpus} GPUs, but this node has {gpus}"
        found.append(note(what, f"#SBATCH --gpus-per-node={site.node.gpus}"))
    missing = [name for name in site.job.variables if name not in facts.environ]
    if missing:
        what = f"{site.label} recommends variables that are not set: {', '.join(missing)}"
        do = f'export {missing[0]}="{site.job.variables[missing[0]]}"; hpctrain submit --site '
        found.append(note(what, f"{do}{site.name} sets all"))
    return found or ok(f"{site.label}: adapters, GPUs and variables as documented")
