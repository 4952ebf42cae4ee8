"""Horovod's own operations behind the methods of a communicator."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from mpi4py import MPI
from torch import Tensor

from hpctrain.cluster.topology import Topology
from hpctrain.comm.communicator import Work
from hpctrain.comm.engines import horovod_session
from hpctrain.comm.engines.horovod_session import Levels
from hpctrain.comm.mpi import MpiCommunicator
from hpctrain.comm.ops import Combination, Op
from hpctrain.comm.plan.choice import has_equal_nodes
from hpctrain.comm.plan.plan import Plan, SizeTable
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.comm.tensor_arguments import flat_of, name_of
from hpctrain.comm.waiting import Watch
from hpctrain.core.config import Settings

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.engines.horovod_session import Session


WORLD = "hpctrain"
"""Name of the communicator of all ranks."""


@dataclass(frozen=True, slots=True)
class HorovodPlace:
    """Some ranks of a world that Horovod serves."""

    session: "Session"
    process_set: Any
    """Horovod's object for these ranks."""
    ranks: tuple[int, ...]
    """Of the world, in the order of the communicator; Horovod has them sorted."""
    levels: "Levels | None"
    """The same ranks in two levels, where there are any."""
    name: str
    """What all names of operations begin with; no other communicator of the world has it."""


class HorovodCommunicator(MpiCommunicator):
    """All-reduces, gathers and broadcasts are Horovod's, as far as it has them; all else is MPI's.

    The ranks meet before each operation, as they do over MPI: Horovod never waits for a rank
    that is late, lost, or about to do something else. Groups of the world are process sets of
    Horovod, groups of groups are not: a process set is made by all ranks of the world together.
    """

    rail = None
    """There are no rails: Horovod decides what goes where."""

    def __init__(
        self, comm: MPI.Intracomm, place: HorovodPlace, *, plan: Plan, watch: Watch
    ) -> None:
        """Take the ranks.

        Args:
            comm: the ranks of ``place``, in the same order; ``close`` frees it.
            place: what Horovod knows them by.
            plan: how reductions travel, by size: ``flat`` or ``two-level``.
            watch: looks at the others during waits.
        """
        super().__init__(comm, watch=watch, world_ranks=place.ranks)
        self.plan = plan
        """What algorithms are chosen by; ``use`` changes it."""
        self._ways = plan.tensors
        self._place = place
        self._levels = place.levels
        self._session, self._hvd = place.session, place.session.torch
        self._num_groups = 0
        self._by_world_rank = sorted(range(comm.size), key=lambda rank: place.ranks[rank])
        self._is_world = place.name == WORLD

    def use(self, plan: Plan) -> None:
        """Choose algorithms by ``plan`` from now on.

        All ranks call it between the same two operations.
        """
        self.plan, self._ways = plan, plan.tensors

    def settle(self) -> None:
        """Let go of the two levels if the plan wants none. Collective, before groups are made."""
        if self._levels is not None and not by_two_levels(self.plan):
            self._session.remove_sets()
            self._levels = None

    # -- reductions -------------------------------------------------------------------------

    def allreduce_by(
        self, way: str, tensor: Tensor, *, op: Op = Op.SUM, scale: float | None = None
    ) -> Work:
        """Reduce an ordinary tensor by a way of this name, ``flat`` or ``two-level``."""
        self._ways = SizeTable(((0, way),))
        try:
            return self.allreduce_(tensor, op=op, scale=scale)
        finally:
            self._ways = self.plan.tensors

    def _allreduce_wide_(self, total: Tensor, how: Combination) -> None:
        name = operation(how)
        if name is None:
            super()._allreduce_wide_(total, how)
            return
        if not total.numel():
            return
        wire = total.to(_WIRE[total.dtype])
        levels = self._levels
        if (
            levels is not None
            and name == "Sum"
            and levels.carries(wire)
            and self._ways.at(wire.nbytes) == "two-level"
        ):
            levels.allreduce_(wire, self._name("two-level", wire), self._watch)
        else:
            self._run(self._hvd.allreduce_async_, wire, "allreduce", op=getattr(self._hvd, name))
        self._library_bytes += wire.nbytes
        if wire is not total:
            total.copy_(wire)

    # -- tensors of all shapes --------------------------------------------------------------

    def _gather_flat(self, mine: Tensor, numels: Sequence[int]) -> list[Tensor]:
        values, lanes = as_lanes(mine)
        if not 0 < sum(numels) * lanes <= MOST_LANES:
            return super()._gather_flat(mine, numels)
        self._library_bytes += values.nbytes
        packed = self._run(self._hvd.allgather_async, values, "all_gather", of_one_size=False)
        return self._in_our_order(packed.view(mine.dtype), numels)

    def _broadcast_flat_(self, chunk: Tensor, root: int) -> None:
        values, _ = as_lanes(chunk)
        if not values.numel():
            return
        self._library_bytes += values.nbytes
        source = self._place.ranks[root]
        self._run(self._hvd.broadcast_async_, values, f"broadcast.{root}", root_rank=source)

    # -- the ranks --------------------------------------------------------------------------

    def close(self) -> None:
        """Free the MPI communicator, and end Horovod with the communicator of the world."""
        was_open = self.is_open
        super().close()
        if was_open and self._is_world:
            self._session.close()

    def _make_flat_group(self, comm: MPI.Intracomm, ranks: Sequence[int]) -> "Communicator | None":
        self._num_groups += 1
        members = tuple(self._place.ranks[rank] for rank in ranks)
        has_all = len(ranks) == self.size
        if len(ranks) == 1 or not (has_all or self._is_world):
            made = super()._make_flat_group(comm, ranks)
            if made is None or len(ranks) > 1:
                return made
            made.close()
            return SerialCommunicator()
        process_set = self._place.process_set
        if not has_all:
            process_set = self._session.process_set(members)
        mine = self.rank in ranks
        split = comm.Split(0 if mine else MPI.UNDEFINED, ranks.index(self.rank) if mine else 0)
        if not mine:
            return None
        place = HorovodPlace(
            self._session,
            process_set,
            members,
            self._levels if has_all else None,
            f"{self._place.name}.{self._num_groups}",
        )
        watch = self._watch.of_group(members)
        return HorovodCommunicator(
            cast("MPI.Intracomm", split), place, plan=self.plan, watch=watch
        )

    def _in_our_order(self, packed: Tensor, numels: Sequence[int]) -> list[Tensor]:
        """Cut what Horovod gives by the ranks of the world into new tensors by our ranks."""
        parts = packed.split([numels[rank] for rank in self._by_world_rank])
        found = dict(zip(self._by_world_rank, parts, strict=True))
        return [found[rank].clone() for rank in range(self.size)]

    def _run(
        self, start: Any, values: Tensor, what: str, *, of_one_size: bool = True, **options: Any
    ) -> Any:
        """Let Horovod do an operation. A name means the same values each time: Horovod knows it.

        Args:
            start: Horovod's function.
            values: what the operation is of.
            what: tells operations apart.
            of_one_size: whether all ranks give as many values.
            options: of the function.
        """
        name = self._name(what, values) if of_one_size else f"{self._place.name} {what}"
        begin = partial(start, values, name=name, process_set=self._place.process_set, **options)
        return self._session.run(begin, self._watch)

    def _name(self, what: str, values: Tensor) -> str:
        return f"{self._place.name} {what} of {values.numel()} {name_of(values.dtype)}"


def by_two_levels(plan: Plan) -> bool:
    """Say whether the plan wants two levels for any size."""
    return any(way == "two-level" for _, way in plan.tensors.steps)


MOST_LANES = (1 << 31) - 1
"""Elements of all ranks together in one operation: Horovod's offsets have 32 bits."""

_WIRE = {torch.float32: torch.float32, torch.float64: torch.float64, torch.int64: torch.int64}
_WIRE |= dict.fromkeys(
    (torch.bool, torch.int8, torch.int16, torch.int32, torch.uint8), torch.int32
)
"""Small integers are summed in 32 bits, whose low ones are their sum that wraps around: Horovod's
torch has no operations for some of them, and the MPI library below it saturates others."""
_LOGICAL = {torch.bitwise_or: "Max", torch.bitwise_and: "Min"}
_ORDER = {torch.minimum: "Min", torch.maximum: "Max"}
_LANES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}


def as_lanes(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the elements of a tensor of any dtype and layout as numbers that Horovod moves.

    Returns:
        The same memory if possible, and how many numbers an element of the tensor is.
    """
    lane = _LANES[tensor.itemsize]
    return flat_of(tensor).view(lane), tensor.itemsize // lane.itemsize


def operation(how: Combination) -> str | None:
    """Return the name of Horovod's operation with the same result for values in ``how.wide``.

    Returns:
        None where there is none: MPI's minimum of NaN is no NaN, and of unsigned numbers Horovod
        knows nothing.
    """
    if how.wide is torch.bool:
        return _LOGICAL.get(how.function)
    if how.wide not in _WIRE:
        return None
    if how.op is Op.SUM:
        return "Sum"
    if how.op is Op.PRODUCT:
        return "Product"
    return None if how.wide.is_floating_point else _ORDER.get(how.function)


def join(
    world: MPI.Intracomm,
    topology: Topology,
    plan: Plan,
    settings: Settings,
    watch: Watch,
    *,
    measures: bool,
) -> HorovodCommunicator:
    """Start Horovod and make the communicator of all ranks. Collective.

    Args:
        world: all ranks; the communicator keeps it.
        topology: of these ranks.
        plan: how reductions travel.
        settings: of rank 0.
        watch: looks at the others during waits.
        measures: whether both ways must be there, to be measured.

    Raises:
        LaunchError: some rank has no Horovod that works; on every rank.
    """
    session = horovod_session.begin(world, settings)
    levels = None
    if has_equal_nodes(topology) and (measures or by_two_levels(plan)):
        levels = Levels(session, topology.nodes)
    place = HorovodPlace(
        session, session.torch.global_process_set, tuple(range(world.size)), levels, WORLD
    )
    return HorovodCommunicator(world, place, plan=plan, watch=watch)


def unmet_wish(topology: Topology, settings: Settings) -> str:
    """Return what to tell where two levels are wanted and cannot be; empty else."""
    if settings.horovod_way != "two-level" or has_equal_nodes(topology):
        return ""
    sizes = [len(ranks) for ranks in topology.nodes]
    return (
        f"two levels of Horovod need several nodes with several ranks each, as many on every one, "
        f"got {sizes}: sums go flat; set HPCTRAIN_HOROVOD_WAY=flat"
    )
