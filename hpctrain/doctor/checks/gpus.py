"""Checks of the GPUs of a machine, and of their assignment to ranks."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from hpctrain.cluster.env import gpus_of_job, launched, ranks_per_node, visible_devices
from hpctrain.core.finding import Finding
from hpctrain.core.units import format_numbers, format_ranks, parse_numbers, plural
from hpctrain.doctor.checks.check import Found, error, few, note, ok, warning
from hpctrain.doctor.checks.facts import Facts, GpuFacts, WorldFacts

_VISIBLE = "CUDA_VISIBLE_DEVICES"


def check_gpus(facts: Facts) -> Found:
    """Report GPUs that are assigned twice, missing GPUs, and GPUs that torch cannot use."""
    found = [*_given_twice(facts), *_too_few(facts), *_unused(facts)]
    text = f"{facts.gpus.num_devices} in this machine"
    if facts.gpus.driver:
        text += f", driver {facts.gpus.driver} for CUDA up to {facts.gpus.cuda}"
    if _VISIBLE in facts.environ:
        text += f", {_VISIBLE}={facts.environ[_VISIBLE]}"
    return found or ok(text)


def check_own_gpus(world: WorldFacts) -> Found:
    """Report ranks of a node that use the same GPU, no GPU, or a GPU far from their cores.

    A rank uses the visible GPU with the index ``local_rank % number of visible GPUs``.
    """
    ranks = world.ranks
    if not any(facts.visible.names for facts in ranks):
        return ok("no rank sees a GPU: the CPU computes")
    found = []
    for members, host in zip(world.topology.nodes, world.topology.hosts, strict=True):
        takers: dict[str, list[int]] = {}
        for number, rank in enumerate(members):
            if seen := ranks[rank].visible.names:
                takers.setdefault(seen[number % len(seen)], []).append(rank)
        found += [
            _shared(device, sharing, host, ranks)
            for device, sharing in takers.items()
            if len(sharing) > 1
        ]
        blind = [rank for rank in members if not ranks[rank].visible.names]
        if 0 < len(blind) < len(members):
            rule = "all ranks of a node must see a GPU, or none"
            what = f"{rule}, but {format_ranks(blind)} on {host} see none"
            found.append(warning(what, "request a GPU for each rank: #SBATCH --gpus-per-node"))
        found += _separate(members, host, ranks)
        found += _far(members, host, ranks)
    if found:
        return few(found)
    counts = sorted(len(facts.visible.names) for facts in ranks)
    seen_by = " to ".join(map(str, dict.fromkeys((counts[0], counts[-1]))))
    if not any(facts.visible.by_torch for facts in ranks):
        return note(f"the environment gives {seen_by} GPUs to each rank, but torch sees none")
    return ok(f"each rank has its own GPU, and sees {seen_by}")


def check_nccl(world: WorldFacts) -> Found:
    """Report whether NCCL can sum gradients over all ranks, or the reason why not."""
    if not any(facts.visible.by_torch for facts in world.ranks):
        return ok("nothing to sum: torch sees no GPU")
    version, obstacle = world.nccl
    version = f"NCCL {version}" if version else "NCCL"
    if not obstacle:
        return ok(f"{version} could sum gradients of all ranks: HPCTRAIN_DEVICE_SUMS=nccl")
    is_wanted = world.settings.device_sums == "nccl"
    do = "unset HPCTRAIN_DEVICE_SUMS, which is nccl" if is_wanted else ""
    what = f"{version} cannot sum gradients of all ranks: {obstacle}"
    return error(what, do) if is_wanted else note(what)


def named(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of the GPUs that the environment assigns to a process.

    A name means the same GPU in all processes of a host, unless a container renumbers the GPUs.
    """
    return _words(visible_devices(environ))


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def _given_twice(facts: Facts) -> list[Finding]:
    devices = _words(facts.environ.get(_VISIBLE, ""))
    twice = [name for name, count in Counter(devices).items() if count > 1]
    if not twice:
        return []
    what = (
        f"{_VISIBLE} must name each GPU once, got {facts.environ[_VISIBLE]}: two ranks would use "
        f"GPU {twice[0]}"
    )
    return [error(what, f"export {_VISIBLE}={','.join(dict.fromkeys(devices))}")]


def _too_few(facts: Facts) -> list[Finding]:
    """Report, before the launch, different numbers of tasks and of GPUs on a node.

    After the launch, ``check_own_gpus`` compares the GPUs of the ranks.
    """
    environ = facts.environ
    ranks = ranks_per_node(environ)
    devices = gpus_of_job(environ)
    if devices is None and _VISIBLE in environ:
        devices = len(set(_words(environ[_VISIBLE])))
    if not ranks or not devices or launched(environ) is not None or ranks == devices:
        return []
    as_many = f"#SBATCH --ntasks-per-node={devices}"
    if ranks < devices:
        return [
            note(
                f"{devices} GPUs on this node for {plural(ranks, 'task')}: some are idle", as_many
            )
        ]
    what = f"each task must have its own GPU, but {ranks} tasks on this node share {devices}"
    return [warning(what, f"{as_many}, or #SBATCH --gpus-per-node={ranks}")]


def _unused(facts: Facts) -> list[Finding]:
    torch = facts.versions.get("torch") or ""
    if facts.gpus.num_devices and torch.endswith("+cpu"):
        what = (
            f"torch must be built for CUDA to use the {facts.gpus.num_devices} GPUs, got {torch}"
        )
        do = "install the build of torch for CUDA: https://pytorch.org/get-started/locally"
        return [warning(what, do)]
    if facts.gpus.num_devices and facts.environ.get(_VISIBLE) in ("", "-1"):
        what = f"{_VISIBLE} hides all {facts.gpus.num_devices} GPUs of this machine"
        return [note(what, f"unset {_VISIBLE}")]
    if facts.gpus.error:
        what = f"nvidia-smi must report the GPUs, but failed: {facts.gpus.error}"
        do = "after an update of the driver, reload its module or reboot; else ask the site"
        return [warning(what, do)]
    needs = re.search(r"\+cu(\d+)\d$", torch) or re.match(r"(\d+)\.", facts.gpus.runtime)
    if needs and facts.gpus.cuda and int(needs[1]) > float(facts.gpus.cuda):
        what = (
            f"the driver must support the CUDA of torch, but torch {torch} needs CUDA {needs[1]}, "
            f"and the driver {facts.gpus.driver} supports CUDA up to {facts.gpus.cuda}"
        )
        old = facts.gpus.cuda.partition(".")[0]
        do = f"install the build of torch for CUDA {old}: https://pytorch.org/get-started/locally"
        return [error(what, do)]
    return []


def _shared(device: str, members: Sequence[int], host: str, ranks: Sequence[Facts]) -> Finding:
    certain = all(ranks[rank].visible.by_torch for rank in members)
    source = "" if certain else ", according to the environment"
    rule = "each rank must have its own GPU"
    what = f"{rule}, but {format_ranks(members)} on {host} use GPU {device}{source}"
    do = (
        "start one rank for each GPU of a node, and let each rank see all GPUs: #SBATCH "
        "--gpus-per-node, or the same CUDA_VISIBLE_DEVICES"
    )
    return error(what, do) if certain else warning(what, do)


def _separate(members: Sequence[int], host: str, ranks: Sequence[Facts]) -> Iterator[Finding]:
    """Report GPUs of a node that cannot access each other's memory."""
    if not all(ranks[rank].visible.by_torch for rank in members):
        return
    if len({frozenset(ranks[rank].visible.names) for rank in members}) > 1:
        rule = "ranks of a node must see the same GPUs to access their memory"
        what = f"{rule}, but {format_ranks(members)} on {host} see different GPUs"
        do = "#SBATCH --gpus-per-node without --gpus-per-task, or srun --gpu-bind=none"
        yield warning(f"{what}: the host sums their gradients", do)
    if pairs := sorted({pair for rank in members for pair in ranks[rank].visible.no_peers}):
        shown = ", ".join(f"{one}-{other}" for one, other in pairs[:_SHOWN])
        pairs_text = f"{plural(len(pairs), 'pair')} on {host} ({shown})"
        what = f"GPUs must access each other's memory, but {pairs_text} cannot"
        do = "`nvidia-smi topo -p2p rw` shows the reason; often the site can turn off IOMMU or ACS"
        yield warning(f"{what}: the host sums their gradients", do)


def _far(members: Sequence[int], host: str, ranks: Sequence[Facts]) -> Iterator[Finding]:
    """Report ranks whose cores are not local to their GPU."""
    far: dict[int, int] = {}
    gpus = ranks[members[0]].gpus
    links = GpuLinks(gpus.topology)
    for number, rank in enumerate(members):
        if not (seen := ranks[rank].visible.names):
            continue
        gpu = _index(seen[number % len(seen)], gpus)
        near = links.cores.get(gpu, set()) if gpu is not None else set()
        if gpu is not None and near and not near & {*ranks[rank].cores.mask}:
            far[rank] = gpu
    if far:
        rank, gpu = next(iter(far.items()))
        mask, cores = format_numbers(ranks[rank].cores.mask), format_numbers(links.cores[gpu])
        nodes = ",".join(links.numa_nodes.get(gpu, "?") for gpu in sorted(links.cores))
        what = (
            f"a rank must use the cores next to its GPU, but {format_ranks([*far])} on {host} do "
            f"not: rank {rank} uses cores {mask} and GPU {gpu}, which is next to cores {cores}"
        )
        yield warning(
            what, f"bind ranks to the NUMA nodes of their GPUs: srun --cpu-bind=map_ldom:{nodes}"
        )


def _index(name: str, gpus: GpuFacts) -> int | None:
    """Return the index that nvidia-smi gives to a GPU; None if nvidia-smi does not list it."""
    if name.isdigit():
        return int(name)
    uuids = [uuid.removeprefix("GPU-") for uuid in gpus.uuids]
    name = name.removeprefix("GPU-")
    return uuids.index(name) if name in uuids else None


_SHOWN = 4  # number of pairs in a message
_CONNECTIONS = {
    "NV": "NVLink",
    "PIX": "a PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "PCIe through the processor",
    "NODE": "PCIe through one NUMA node",
    "SYS": "the link between the sockets",
}
"""Kinds of connection between two devices, by nvidia-smi's abbreviation, fastest first."""


@dataclass(frozen=True)
class GpuLinks:
    """Connections between GPUs, NICs and cores, parsed from ``nvidia-smi topo -m``."""

    text: str

    @cached_property
    def _rows(self) -> dict[str, dict[str, str]]:
        """Cells of the matrix, by the name of the row and the name of the column."""
        lines = [line for line in self.text.splitlines() if line.strip()]
        head = next((line for line in lines if line.lstrip().startswith("GPU0")), "")
        names = re.split(r"\t+|\s{2,}", head.strip())
        rows: dict[str, dict[str, str]] = {}
        for line in lines:
            name, *cells = line.split()
            if line is not head and name in names and cells:
                rows[name] = dict(zip(names, cells, strict=False))
        return rows

    @property
    def between_gpus(self) -> dict[tuple[int, int], str]:
        """Connection of each pair of GPUs, such as ``NV18`` or ``PIX``; keys are GPU indices."""
        gpus = sorted(int(name[3:]) for name in self._rows if re.fullmatch(r"GPU\d+", name))
        return {
            (one, other): self._rows[f"GPU{one}"].get(f"GPU{other}", "")
            for one, other in combinations(gpus, 2)
        }

    @property
    def to_adapters(self) -> dict[int, str]:
        """Connection of each GPU with its nearest NIC; empty if the machine has no NIC."""
        order = [*_CONNECTIONS]
        found = {}
        for name, cells in self._rows.items():
            ways = [way for card, way in cells.items() if card.startswith(("NIC", "mlx"))]
            if name.startswith("GPU") and ways:
                found[int(name[3:])] = min(ways, key=lambda way: order.index(_kind(way)))
        return found

    @property
    def cores(self) -> dict[int, set[int]]:
        """Cores that are local to each GPU."""
        return {
            int(name[3:]): set(parse_numbers(cells["CPU Affinity"]))
            for name, cells in self._rows.items()
            if name.startswith("GPU") and "CPU Affinity" in cells
        }

    @property
    def numa_nodes(self) -> dict[int, str]:
        """The NUMA node of each GPU."""
        return {
            int(name[3:]): cells["NUMA Affinity"]
            for name, cells in self._rows.items()
            if name.startswith("GPU") and "NUMA Affinity" in cells
        }


def _kind(way: str) -> str:
    return "NV" if way.startswith("NV") else way if way in _CONNECTIONS else "SYS"


def check_gpu_links(facts: Facts) -> Found:
    """Report the connections between GPUs, and between GPUs and NICs."""
    links = GpuLinks(facts.gpus.topology)
    if not facts.gpus.num_devices or not facts.gpus.topology:
        return ok("no GPUs" if not facts.gpus.num_devices else "nvidia-smi does not report them")
    module = "loaded" if facts.gpus.has_peermem else "not loaded, and not needed"
    texts = []
    for title, ways in (
        ("between GPUs", [*links.between_gpus.values()]),
        ("to the nearest network adapter", [*links.to_adapters.values()]),
    ):
        kinds = Counter(map(_kind, ways))
        words = [
            f"{_CONNECTIONS[kind]}{_of(kinds[kind], len(ways))}"
            for kind in _CONNECTIONS
            if kinds[kind]
        ]
        texts += [f"{title} {' and '.join(words)}"] if words else []
    texts += [f"GPUDirect RDMA: nvidia_peermem {module}"]
    return ok("; ".join(texts))


def _of(number: int, whole: int) -> str:
    return "" if number == whole else f" ({number} of {whole})"
