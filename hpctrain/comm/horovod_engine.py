"""The engine ``horovod``: a communicator that reduces with Horovod."""

import functools
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hpctrain.cluster.env import variables
from hpctrain.cluster.libraries import family, loaded_libmpi
from hpctrain.cluster.topology import Topology
from hpctrain.comm import requests
from hpctrain.comm.agreement import raise_if_any
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.mpi_start import MPI
from hpctrain.comm.ops import Combination, Op
from hpctrain.comm.plan.plan import Plan, SizeTable
from hpctrain.comm.tensor_arguments import name_of
from hpctrain.comm.waiting import Limit, Watch
from hpctrain.comm.watched_calls import WatchedCalls
from hpctrain.core.config import Settings
from hpctrain.core.errors import CommError, LaunchError
from hpctrain.launch.installed_horovod import needed_mpi


class HorovodCommunicator(MpiCommunicator):
    """A communicator that runs all-reduces with Horovod if possible, and the rest with MPI.

    The ranks synchronize before each operation, as in ``MpiCommunicator``, so that Horovod does
    not wait for a late or lost rank or for a different operation. A group of all ranks, in any
    order, also uses Horovod; a smaller group uses MPI.

    Args:
        comm: all ranks that Horovod serves, in any order; ``close`` frees it.
        library: the loaded Horovod.
        watch: performs all waits.
        sums: algorithm of sums by size.
        name: prefix of all names of operations; must differ from the prefix of every other
            communicator.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        library: "Library",
        *,
        watch: Watch,
        sums: "Sums",
        name: str = "hpctrain",
    ) -> None:
        super().__init__(comm, watch=watch)
        self._library, self._hvd = library, library.torch
        self.sums = sums
        self._name = name
        self._num_groups = 0

    def _allreduce_wide_(self, total: Tensor, how: Combination) -> None:
        name = operation(how)
        if name is None:
            super()._allreduce_wide_(total, how)
        elif total.numel():
            wire, levels = total.to(_WIRE[total.dtype]), self.sums.levels
            op = getattr(self._hvd, name)
            two_level = self.sums.table.at(wire.nbytes) == "two-level" and name == "Sum"
            if levels and two_level and wire.numel() >= levels.local_size:
                self._sum_by_levels_(wire, levels)
            else:
                self._run(self._hvd.allreduce_async_, wire, f"allreduce {_size(wire)}", op=op)
            if wire is not total:
                total.copy_(wire)

    def _sum_by_levels_(self, wire: Tensor, levels: "_Levels") -> None:
        """Reduce-scatter within nodes, all-reduce between nodes, all-gather within nodes."""
        hvd, what = self._hvd, f"two-level {_size(wire)}"
        node, rail = {"process_set": levels.node}, {"process_set": levels.rail}
        part = self._run(hvd.reducescatter_async, wire, f"{what}: node", op=hvd.Sum, **node)
        self._run(hvd.allreduce_async_, part, f"{what}: rail", op=hvd.Sum, **rail)
        wire.copy_(self._run(hvd.allgather_async, part, f"{what}: publish", **node))

    def group(self, ranks: Sequence[int]) -> Communicator | None:
        """Create a group; the number of groups so far makes names of operations unique."""
        self._num_groups += 1
        return super().group(ranks)

    def _make_flat_group(
        self, members: MPI.Intracomm, ranks: Sequence[int], limit: Limit | None
    ) -> Communicator:
        if len(ranks) < self.size:
            return super()._make_flat_group(members, ranks, limit)
        return HorovodCommunicator(
            members,
            self._library,
            watch=self._watch.of_group(ranks, limit),
            sums=self.sums,
            name=f"{self._name}.{self._num_groups}",
        )

    def _run(self, start: Any, values: Tensor, what: str, **options: Any) -> Any:
        """Start an operation of Horovod and wait for it with the watch.

        After a ``RankLostError`` Horovod may still use the tensors.

        Args:
            start: function of Horovod.
            values: input of the operation.
            what: description in the name of the operation; must contain size and dtype, because
                Horovod caches both by name.
            options: further arguments of ``start``.

        Raises:
            CommError: the operation failed in Horovod.
        """
        name = f"{self._name} {what}"
        self._library_bytes += values.nbytes
        try:
            handle = start(values, name=name, **options)
            self._watch.wait(partial(self._hvd.poll, handle))
            return self._hvd.synchronize(handle)
        except (self._hvd.HorovodInternalError, ValueError) as error:
            raise CommError(
                f"an operation of Horovod {self._library.version} failed: {error}; read the "
                f"output of Horovod, or set HPCTRAIN_ENGINE=hpctrain"
            ) from error


def _size(values: Tensor) -> str:
    return f"of {values.numel()} {name_of(values.dtype)}"


class _Levels(NamedTuple):
    """Process sets of Horovod: ranks of this node, and ranks with the same local rank."""

    node: Any
    rail: Any
    local_size: int

    @classmethod
    def make(cls, hvd: Any, nodes: Sequence[Sequence[int]], rank: int) -> "_Levels":
        """Create the process sets of ``nodes``, which have equal numbers of ranks. Collective."""
        on_nodes = [sorted(ranks) for ranks in nodes]
        across = [list(ranks) for ranks in zip(*on_nodes, strict=True)]
        sets = [(ranks, hvd.add_process_set(ranks)) for ranks in (*on_nodes, *across)]
        node, rail = (made for ranks, made in sets if rank in ranks)
        return cls(node, rail, len(on_nodes[0]))


@dataclass
class Sums:
    """Algorithm of sums for each size, in a table that a communicator shares with its groups."""

    table: SizeTable
    """``flat`` or ``two-level``; all ranks must replace the table between the same operations."""
    levels: _Levels | None = None


class _World(HorovodCommunicator):
    """The communicator of all ranks, which starts Horovod and shuts it down on ``close``.

    The constructor and ``close`` are collective.
    """

    def __init__(
        self,
        world: MPI.Intracomm,
        library: "Library",
        settings: Settings,
        watch: Watch,
        sums: Sums,
    ) -> None:
        super().__init__(world, library, watch=watch, sums=sums)
        self._world = self._calls.duplicate()
        with variables(variables_for(settings)):
            self._hvd.init(comm=self._world)

    def close(self) -> None:
        """Free the MPI communicator, and shut down Horovod."""
        was_open = self.is_open
        super().close()
        if was_open:
            self._hvd.shutdown()
            requests.free(self._world)


def join(
    world: MPI.Intracomm, topology: Topology, plan: Plan, settings: Settings, watch: Watch
) -> HorovodCommunicator:
    """Start Horovod and create the communicator of all ranks. Collective.

    Args:
        world: MPI communicator, owned by the result.
        topology: nodes of the ranks.
        plan: algorithms by size.
        settings: settings of rank 0.
        watch: performs all waits.

    Raises:
        LaunchError: Horovod does not work or is already initialized on a rank; on every rank.
    """
    refusal, here = None, None
    try:
        here = library()
        if here.torch.is_initialized():
            refusal = (
                "Horovod must not be initialized twice in a process, but is already initialized; "
                "remove the program's own call of Horovod's init(), shut the other world down "
                "first, or set HPCTRAIN_ENGINE=hpctrain"
            )
    except LaunchError as error:
        refusal = str(error)
    raise_if_any(WatchedCalls(world, watch).allgather(refusal), LaunchError)
    assert here is not None
    made = _World(world, here, settings, watch, Sums(plan.tensors))
    if any(algorithm == "two-level" for _, algorithm in plan.tensors.steps):
        made.sums.levels = _Levels.make(here.torch, topology.nodes, world.rank)
    return made


_WIRE = {torch.float32: torch.float32, torch.float64: torch.float64, torch.int64: torch.int64}
_WIRE |= dict.fromkeys(
    (torch.bool, torch.int8, torch.int16, torch.int32, torch.uint8), torch.int32
)
"""dtype in which Horovod sums, by dtype. Small integers are summed in int32, whose low bits are
the sum that wraps around: Horovod has no operations for some of them, and MPI saturates others."""
_LOGICAL = {torch.bitwise_or: "Max", torch.bitwise_and: "Min"}
_ORDER = {torch.minimum: "Min", torch.maximum: "Max"}


def operation(how: Combination) -> str | None:
    """Return the name of the Horovod operation that combines values of ``how.accumulate_dtype``.

    Returns None if there is no such operation: the minimum in MPI does not propagate NaN, and
    Horovod would compare unsigned integers that are stored as signed ones in the wrong order.
    """
    if how.accumulate_dtype is torch.bool:
        return _LOGICAL.get(how.function)
    if how.accumulate_dtype not in _WIRE:
        return None
    if how.op in (Op.SUM, Op.PRODUCT):
        return "Sum" if how.op is Op.SUM else "Product"
    return None if how.accumulate_dtype.is_floating_point else _ORDER.get(how.function)


class Library(NamedTuple):
    """The version and the torch module of the Horovod package that this process has loaded."""

    version: str
    torch: Any  # the module ``horovod.torch``


@functools.cache
def library() -> Library:
    """Load the Horovod package, even if modules that emulate Horovod are loaded.

    The emulating modules stay in ``sys.modules``. MPI is loaded first, by this module.

    Raises:
        LaunchError: Horovod is not installed, does not load, or was built for another MPI.
    """
    if problem := _problem():
        raise LaunchError(_remedy(problem))
    with _without_emulation():
        try:
            package = importlib.import_module("horovod")
            return Library(package.__version__, importlib.import_module("horovod.torch"))
        except (ImportError, OSError) as error:
            raise LaunchError(_remedy(f"Horovod does not load: {error}")) from error


def _problem() -> str:
    """Return why Horovod cannot be loaded; empty if it can.

    The check comes before the import, which could load a second MPI library.
    """
    needed = needed_mpi()
    if needed is None:
        return "Horovod is not installed"
    if not needed:
        return "Horovod was built without PyTorch or without MPI"
    here = loaded_libmpi()
    if here and family(Path(needed)) not in [family(path) for path in here]:
        return f"Horovod was built for another MPI ({needed}) than {here[0]}"
    return ""


def _remedy(what: str) -> str:
    return (
        f"the engine horovod must have a Horovod for this PyTorch and MPI, but {what}; run "
        f"`hpctrain horovod build`, or set HPCTRAIN_ENGINE=hpctrain"
    )


@contextmanager
def _without_emulation() -> Iterator[None]:
    """Hide modules that emulate Horovod during the block.

    Modules of Horovod that the block loads stay in ``sys.modules`` only if no module or import
    hook emulates Horovod.
    """
    stands_in = {name: one for name, one in _modules() if not _is_real(name, one)}
    finders = list(sys.meta_path)
    sys.meta_path[:] = [one for one in finders if not getattr(one, "hpctrain_shim", False)]
    is_veiled = bool(stands_in) or len(sys.meta_path) < len(finders)
    for name in stands_in:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.meta_path[:] = finders
        if is_veiled:
            for name, _ in _modules():
                del sys.modules[name]
            sys.modules.update(stands_in)


def _modules() -> list[tuple[str, ModuleType]]:
    return [
        (name, one) for name, one in sys.modules.items() if name.partition(".")[0] == "horovod"
    ]


def _is_real(name: str, module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    stands_in = vars(module).get("__hpctrain_shim__", False)
    return spec is not None and spec.name == name and not stands_in


def variables_for(settings: Settings) -> dict[str, str | None]:
    """Return environment variables for Horovod; a value of None removes the variable.

    The user's variables for fusion and cycle time apply if ``settings`` does not set them.
    """
    found: dict[str, str | None] = {
        "HOROVOD_CONTROLLER": "mpi",
        "HOROVOD_CPU_OPERATIONS": "mpi",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
        "HOROVOD_TIMELINE": None,  # hpctrain writes the timeline to this file
    }
    if settings.fusion_bytes is not None:
        found["HOROVOD_FUSION_THRESHOLD"] = str(settings.fusion_bytes)
    if settings.cycle_s is not None:
        found["HOROVOD_CYCLE_TIME"] = f"{1000 * settings.cycle_s:.6g}"
    return found
