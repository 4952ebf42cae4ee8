"""In-place recovery: when ranks die, those that are left go on as a smaller world.

Each of them keeps its process, its data and its model. Who finds that a rank is lost revokes the
world, so that all others stop waiting for it; all that are left agree that they cannot go on as
they are, shrink the world, and make anew what depends on who the ranks are.

Source: Bland, Bouteiller, Herault, Bosilca and Dongarra 2013, "Post-failure recovery of MPI
communication capability: design and rationale".
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from hpctrain.cluster.env import RANK_LOST
from hpctrain.comm.mpi_start import is_loss, is_of_mpi
from hpctrain.core.errors import CommError, RankLostError
from hpctrain.core.logs import logger
from hpctrain.core.units import format_ranks
from hpctrain.runtime import initialization, world

if TYPE_CHECKING:
    from hpctrain.comm.mpi_start import MpiComm

T = TypeVar("T")

LIMIT_S = 60.0
"""Longest time for the ranks that are left to make their world: if one stands still, all end."""


def is_on() -> bool:
    """Say whether this world recovers, see ``hpctrain launch --recover``."""
    here = world.current()
    return here.settings.recover and here.ranks is not None


class Attempt(NamedTuple):
    """How something that all ranks do together has ended."""

    result: Any  # of the function; None where ranks were lost
    lost: list[int]  # their numbers, in the world before
    error: Exception | None  # that this rank has met then


def attempt(function: Callable[[], T], *, moves: bool = True) -> Attempt:
    """Call a function on all ranks; shrink the world if ranks are lost meanwhile, see ``_shrink``.

    Collective over those that are left. Any other error passes through, and ends all ranks.
    """
    if not is_on():  # one rank is left, or there was but one
        return Attempt(function(), [], None)
    result: T | None = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as caught:
        if not _may_be_loss(caught):
            raise
        error = caught
    if _all_are_well(am_well=error is None):
        return Attempt(result, [], None)
    lost = _shrink(lambda ranks: initialization.go_on(ranks, moves=moves))
    if not lost:  # all are there: it is an error like any other
        raise error or CommError("the attempt has failed on another rank, see what that says")
    return Attempt(None, lost, error)


def survive(error: Exception, allows: Callable[[list[int]], object]) -> list[int]:
    """Go on from an ``error`` by which a rank was lost, in a smaller world; return who is lost.

    Collective over those that are left, all of which have met such an error. It is raised again
    where the world does not recover, or nobody is lost; ``RankLostError``, which names those that
    are, where ``allows`` says no of them.
    """
    if not is_on() or world.current().origin.spares is not None or not _is_of_loss(error):
        raise error

    def check(lost: list[int]) -> None:
        if not allows(lost):
            raise RankLostError(_died(lost)) from error

    def make(ranks: "MpiComm") -> None:
        initialization.go_on(ranks)
        world.current().rebuild.move()

    if not (lost := _shrink(make, check)):
        raise error
    return lost


@contextmanager
def ends_with_losses(remedy: str) -> Iterator[None]:
    """Add a rule and a remedy to the error of a lost rank that the ranks left cannot survive.

    Local. For work inside that does not run in ``attempt``.
    """
    try:
        yield
    except Exception as error:
        if not is_on() or not _is_of_loss(error):
            raise
        raise RankLostError(f"{error}; {remedy}") from error


def give_up(error: Exception) -> NoReturn:
    """Raise an ``error`` of MPI by which a rank was lost as ``RankLostError``, others as they are.

    Not collective: it names those that are known here to have died.
    """
    if not is_loss(error) or not is_on():
        raise error
    raise RankLostError(_died(_survivors().failed(_ranks()))) from error


def _died(lost: list[int]) -> str:
    who = f"{format_ranks(lost)} of {world.size()}" if lost else f"one of {world.size()} ranks"
    return (
        f"{who} died, and the others cannot go on without what was there; begin again from the "
        f"last commit or checkpoint"
    )


def _may_be_loss(error: BaseException) -> bool:
    """Say whether an error may come of a lost rank: all that are left then ask each other.

    MPI has several for it: a call in which it is found may say that it knows no better.
    """
    return isinstance(error, CommError) or is_of_mpi(error) or _is_of_loss(error)


def _is_of_loss(error: BaseException) -> bool:
    """Say whether an error says that a rank is lost, or one is known to be.

    What a collective returns as one of its ranks dies may be anything, and any error come of that.
    """
    return (
        isinstance(error, RankLostError) or is_loss(error) or _survivors().knows_of_loss(_ranks())
    )


def _all_are_well(*, am_well: bool) -> bool:
    """Say whether all ranks are there and well; the same on every rank that is left. Collective.

    Those that wait for one that is not well, in whatever they do, stop waiting by an error. All
    end with exit code 87 after ``HPCTRAIN_TIMEOUT`` seconds: to MPI a rank is not dead that stands
    still, or has ended by an exit code of its own.
    """
    if not am_well:
        _end_waits()
    with _limited(world.current().settings.timeout):
        return bool(_survivors().agree(_ranks(), am_well=am_well))


def _shrink(
    make: "Callable[[MpiComm], object]", check: Callable[[list[int]], object] = lambda _: None
) -> list[int]:
    """Make the world of those that are left, and return who is lost. Collective over those left.

    Nothing is made where nobody is lost, or ``check`` raises for those who are, the same on all.
    ``make`` is told the ranks of the next world, and is called again if more of them die in it.
    All end with exit code 87 where that takes longer than ``LIMIT_S`` seconds.
    """
    before, ranks, survivors = world.current(), _ranks(), _survivors()
    lost: list[int] = []

    def remade(left: "MpiComm") -> None:
        nonlocal lost
        lost = survivors.lost(ranks, left)
        check(lost)
        make(left)

    _end_waits()  # of whoever has not heard of it yet
    with _limited(LIMIT_S):
        left = survivors.shrink(ranks)
        if left.size == ranks.size:
            return []
        check(survivors.lost(ranks, left))
        if before.origin.spares is None:
            survivors.remake(left, remade)
        else:
            before.origin.spares.replace(remade)
    if world.rank() == 0:
        num_spares = world.size() - before.topology.size + len(lost)
        logger.warning(
            "%s of %d died; the %d that are left go on%s",
            *(format_ranks(lost), before.topology.size, world.size() - num_spares),
            f", with {num_spares} of the spares" if num_spares else "",
        )
    return lost


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """End all ranks with exit code 87 where what is done inside lasts longer: MPI has no limit."""
    hooks, presence = world.current().attachments.hooks, world.current().presence
    assert hooks is not None
    assert presence is not None

    def end() -> None:
        stopped = presence.stopped()
        logger.error(
            "the ranks that are left have not agreed in %g s: %s; all ranks end",
            limit_s,
            f"{format_ranks(stopped)} of this node stopped by a signal"
            if stopped
            else "a rank stands still, or has ended by an exit code of its own",
        )
        hooks.abort(RANK_LOST)

    guard = threading.Timer(min(limit_s, threading.TIMEOUT_MAX), end)
    guard.daemon = True
    guard.start()
    try:
        yield
    finally:
        guard.cancel()


def _ranks() -> "MpiComm":
    ranks = world.current().ranks
    assert ranks is not None
    return ranks


def _survivors() -> ModuleType:
    from hpctrain.comm import survivors  # noqa: PLC0415 - a world of one needs no MPI

    return survivors


def _end_waits() -> None:
    """Let nobody wait in this world any more, on whichever rank. Not collective."""
    _survivors().revoke(_ranks())
    _survivors().end_waits()
