"""Meshes of ranks that keep the axes with the most traffic inside a node."""

import math
import sys
from collections.abc import Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpctrain.cluster.topology import Topology
from hpctrain.comm.agreement import agreed, raise_if_refused, require_equal
from hpctrain.core.errors import ConfigError, TopologyError
from hpctrain.core.torch_compat import flattened, forget_earlier_meshes, unflattened
from hpctrain.core.units import format_numbers
from hpctrain.runtime import initialization, world

AXES = ("dp", "pp", "cp", "tp")
"""Axes of a mesh, in the order of increasing traffic."""

TRAFFIC = {
    "dp": "gradients",
    "pp": "activations from stage to stage",
    "cp": "keys and values of every attention",
    "tp": "activations of every layer",
}
"""Data that the ranks along each axis exchange."""


def build_mesh(
    *, tp: int = 1, pp: int = 1, dp: int | None = None, cp: int = 1, device: str = "cpu"
) -> DeviceMesh:
    """Arrange all ranks along the axes ``dp``, ``pp``, ``cp`` and ``tp``. Collective.

    The ranks of a ``tp`` group are placed inside a node if the node has enough ranks, then the
    ranks of ``cp``, then of ``pp``; ``dp`` is outermost. Rank 0 prints the placement and the
    traffic between nodes to stderr. The mesh has all four axes, including axes of size 1.

    If necessary, the function calls ``hpctrain.init()`` and creates torch's default process group
    with the backend ``hpctrain``.

    Args:
        tp: ranks that divide the matrices of each layer.
        pp: stages of a pipeline.
        dp: replicas, or shards of a replica; by default the number of ranks divided by the other
            sizes.
        cp: ranks that divide the sequence of each sample.
        device: device type of the tensors that the ranks exchange.

    Raises:
        TopologyError: the product of the sizes is not the number of ranks, or the ranks of
            torch.distributed and MPI differ; on every rank.
        MismatchError: the ranks request different meshes; on every rank.
        ConfigError: a rank has no such device; on every rank.
    """
    initialization.init()
    if not dist.is_initialized():
        dist.init_process_group("hpctrain")
    forget_earlier_meshes()
    here = world.current()
    with agreed(here.comm, TopologyError):
        sizes = _checked(here.topology, dp=dp, pp=pp, cp=cp, tp=tp)
    request = f"{_words(sizes)} on {device}"
    require_equal(here.comm, [request], "build_mesh", "request the same mesh on all ranks")
    with agreed(here.comm, ConfigError):
        _use(device)
    order = packed(here.topology.nodes, [sizes[axis] for axis in reversed(AXES)])
    ranks = torch.tensor(order).view(*sizes.values())
    mesh = DeviceMesh(device, ranks, mesh_dim_names=AXES)
    if here.topology.rank == 0:
        sys.stderr.write("".join(f"hpctrain: {line}\n" for line in placement(mesh).splitlines()))
    return mesh


def _use(device: str) -> None:
    """Initialize the device; otherwise torch selects GPU LOCAL_RANK, which may not exist."""
    try:
        torch.empty(0, device=device)
    # Torch raises AssertionError if torch was built without this device type.
    except (AssertionError, RuntimeError) as error:
        raise ConfigError(
            f"every rank must have the device of a mesh, but {device!r} failed on a rank: "
            f"{str(error).splitlines()[0]}; pass a device that every rank has"
        ) from None


def gradient_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes ``dp`` and ``cp`` joined into one axis, along which gradients are averaged.

    Collective over all ranks at the first call for a mesh; later calls return the same axis.

    Args:
        mesh: result of ``build_mesh``.
    """
    if mesh["cp"].size() == 1:
        return mesh["dp"]
    return flattened(mesh["dp", "cp"], "dp_cp")


def hybrid_mesh(mesh: DeviceMesh | None = None) -> DeviceMesh:
    """Split one axis in two: ``replicate`` between nodes, ``shard`` inside a node (HSDP).

    Collective over all ranks.

    Args:
        mesh: one axis, such as ``build_mesh(tp=2)["dp"]``; by default all ranks.

    Raises:
        TopologyError: the nodes do not have equal numbers of consecutive ranks of the axis.
    """
    axis = build_mesh()["dp"] if mesh is None else mesh
    topology = world.current().topology
    node_of = {rank: node for node, ranks in enumerate(topology.nodes) for rank in ranks}
    nodes = [node_of[rank] for rank in axis.mesh.tolist()]
    runs = [len(list(run)) for _, run in groupby(nodes)]
    sizes = ", ".join(map(str, runs))
    refusal = None
    if len({*runs}) > 1 or len(runs) > len({*nodes}):
        refusal = (
            f"every node must have the same number of consecutive ranks of the axis for HSDP, got "
            f"{sizes}; shard over the whole axis, or change the mesh"
        )
    raise_if_refused(world.current().comm, refusal, TopologyError)
    parts = {"replicate": len(runs), "shard": runs[0]}
    return unflattened(axis, tuple(parts.values()), tuple(parts))


def require_one_axis(mesh: DeviceMesh, axis: str) -> None:
    """Raise ``ConfigError`` unless ``mesh`` has one axis; ``axis`` is for the message."""
    if mesh.ndim != 1:
        names = ", ".join(mesh.mesh_dim_names or ("no names",))
        raise ConfigError(
            f'the mesh must have one axis, got {mesh.ndim} axes ({names}); use mesh["{axis}"]'
        )


def _checked(topology: Topology, *, dp: int | None, **inner: int) -> dict[str, int]:
    """Check and return the sizes of all axes; ``inner`` has the axes other than ``dp``."""
    rank, size = dist.get_rank(), dist.get_world_size()
    if (rank, size) != (topology.rank, topology.size):
        raise TopologyError(
            f"ranks of MPI and torch.distributed must be equal, but this is rank {topology.rank} "
            f"of {topology.size} in MPI and rank {rank} of {size} in torch.distributed; start "
            f'the ranks with mpirun, srun or hpctrain launch, and init_process_group("hpctrain")'
        )
    not_integers = {a: n for a, n in (inner | {"dp": dp}).items() if type(n) is not int}
    if not_integers and not_integers != {"dp": None}:
        found = ", ".join(f"{a}={n!r}" for a, n in not_integers.items() if n is not None)
        raise TopologyError(f"sizes of axes must be integers, got {found}; pass an int")
    rest = math.prod(inner.values())
    if min(rest, *inner.values()) < 1 or topology.size % rest:
        raise TopologyError(
            f"the sizes of the axes of a mesh must be at least 1, and their product must divide "
            f"the number of ranks, {topology.size}, got {_words(inner)}, with the product {rest}; "
            f"start a multiple of {rest} ranks, or make an axis smaller"
        )
    sizes = {"dp": topology.size // rest if dp is None else dp, **inner}
    if math.prod(sizes.values()) != topology.size:
        raise TopologyError(
            f"the product of the sizes of the axes of a mesh must be the number of ranks, "
            f"{topology.size}, got {_words(sizes)}; omit dp, which then is {topology.size // rest}"
        )
    return sizes


def _words(sizes: dict[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in sizes.items())


def packed(nodes: Sequence[Sequence[int]], sizes: Sequence[int]) -> list[int]:
    """Return all ranks, ordered so that each group of an axis is on one node if possible.

    Not collective.

    Args:
        nodes: ranks of each node.
        sizes: sizes of the axes, innermost first; their product is the number of ranks.

    Returns:
        All ranks in row-major order of the mesh. For each axis, every node forms as many complete
        groups as possible; the remaining ranks form groups across nodes.
    """
    units = [(node, [rank]) for node, ranks in enumerate(nodes) for rank in ranks]
    for size in sizes:
        groups, left_over = [], []
        for node in dict.fromkeys(node for node, _ in units):
            on_node = [unit for unit in units if unit[0] == node]
            whole = len(on_node) // size * size
            groups += [on_node[i : i + size] for i in range(0, whole, size)]
            left_over += on_node[whole:]
        groups += [left_over[i : i + size] for i in range(0, len(left_over), size)]
        joined = [(group[0][0], [r for _, ranks in group for r in ranks]) for group in groups]
        units = sorted(joined, key=lambda unit: min(unit[1]))
    return [rank for _, ranks in units for rank in ranks]


def placement(mesh: DeviceMesh) -> str:
    """Describe the placement of a mesh and its traffic between nodes. Not collective.

    Args:
        mesh: any torch mesh, such as from ``init_device_mesh``.

    Returns:
        Two lines: the axes, each with the ranks of its first group, and the traffic. If tensor or
        context parallel groups extend over several nodes, a third line is a warning.

    Raises:
        NotInitializedError: ``init`` was not called.
    """
    topology = world.current().topology
    node_of = {rank: node for node, ranks in enumerate(topology.nodes) for rank in ranks}
    names = mesh.mesh_dim_names or tuple(f"axis {number}" for number in range(mesh.ndim))
    across: list[str] = []
    inside: list[str] = []
    shown: list[str] = []
    for number, (axis, size) in enumerate(zip(names, mesh.shape, strict=True)):
        groups = mesh.mesh.movedim(number, -1).reshape(-1, size).tolist()
        if size > 1:
            shown.append(f"{axis}={size} (first {format_numbers(groups[0])})")
            crosses = any(len({node_of[rank] for rank in group}) > 1 for group in groups)
            (across if crosses else inside).append(axis)
    plural = "" if topology.num_nodes == 1 else "s"
    axes = " x ".join(shown) or "one rank"
    lines = [
        f"mesh of {mesh.size()} ranks on {topology.num_nodes} node{plural}: {axes}",
        f"between nodes: {_traffic(across)}; inside a node: {_traffic(inside)}",
    ]
    if slow := [axis for axis in across if axis in ("tp", "cp")]:
        sizes = ", ".join(f"{axis}={mesh.size(names.index(axis))}" for axis in slow)
        fewest = min(map(len, topology.nodes))
        lines.append(
            f"slow: {sizes} does not fit on nodes of {fewest} ranks, so every layer waits for the "
            f"network; a smaller {' and '.join(slow)} stays inside a node"
        )
    return "\n".join(lines)


def _traffic(axes: Sequence[str]) -> str:
    words = [
        f"{TRAFFIC[axis]} ({axis})" if axis in TRAFFIC else f"data of {axis}" for axis in axes
    ]
    return " and ".join(words) or "nothing"
