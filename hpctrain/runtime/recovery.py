"""In-place recovery: after the death of ranks, the survivors continue as a smaller world.

Each survivor keeps its process, its data and its model. A rank that detects a loss revokes the
world, so that no rank waits for the lost rank. The survivors agree that the world has failed,
shrink the world, and rebuild the objects that depend on the ranks.

Source: Bland, Bouteiller, Herault, Bosilca and Dongarra 2013, "Post-failure recovery of MPI
communication capability: design and rationale".
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, TypeVar

from hpctrain.cluster.env import RANK_LOST
from hpctrain.comm import survivors
from hpctrain.comm.mpi_start import is_loss, is_of_mpi
from hpctrain.core.errors import CommError, RankLostError
from hpctrain.core.logs import logger
from hpctrain.core.units import format_ranks
from hpctrain.runtime import initialization, world

if TYPE_CHECKING:
    from hpctrain.comm.mpi_start import MpiComm

T = TypeVar("T")

LIMIT_S = 60.0
"""Time limit for the survivors to create their world; after this time all ranks end."""

_RESTART = "restart from the last commit or checkpoint"


def is_on() -> bool:
    """Return True if this world recovers from lost ranks, see ``hpctrain launch --recover``."""
    here = world.current()
    return here.settings.recover and here.ranks is not None


class Attempt(NamedTuple):
    """Outcome of ``attempt`` on this rank."""

    result: Any  # result of the function; None if ranks were lost
    lost: list[int]  # lost ranks, numbered as in the previous world
    error: Exception | None  # error that the function raised on this rank, if any


def attempt(function: Callable[[], T], *, moves: bool = True) -> Attempt:
    """Call a function on all ranks; shrink the world if ranks are lost during the call.

    Collective over the survivors.

    Args:
        function: function to call.
        moves: True to move registered objects to the new world, see ``Rebuild``.

    Raises:
        Exception: ``function`` raised an error on this rank that a lost rank did not cause; if
            uncaught, the error ends all ranks.
        CommError: the call failed on another rank, and no rank is lost.
    """
    if not is_on():  # a world of one rank
        return Attempt(function(), [], None)
    result: T | None = None
    error: Exception | None = None
    try:
        result = function()
    except Exception as caught:
        if not _may_be_loss(caught):
            raise
        error = caught
    if _have_all_succeeded(has_succeeded=error is None):
        return Attempt(result, [], None)
    lost = _shrink(lambda ranks: initialization.replace_world(ranks, moves=moves))
    if not lost:  # no rank is lost: an ordinary error
        raise error or CommError(
            "all ranks must complete the function, but another rank failed; see the error of that "
            "rank"
        )
    return Attempt(None, lost, error)


def survive(error: Exception, allows: Callable[[list[int]], object]) -> list[int]:
    """Shrink the world after an error caused by lost ranks; return the lost ranks.

    Collective over the survivors: each of them has caught such an error and calls this function.

    Args:
        error: the caught error; raised again if the world does not recover or no rank is lost.
        allows: takes the lost ranks; returns False if the program cannot continue without these
            ranks.

    Raises:
        RankLostError: ``allows`` returned False; the message names the lost ranks.
    """
    if not is_on() or world.current().origin.spares is not None or not _is_of_loss(error):
        raise error

    def check(lost: list[int]) -> None:
        if not allows(lost):
            raise RankLostError(_died(lost)) from error

    def make(ranks: "MpiComm") -> None:
        initialization.replace_world(ranks)
        world.current().rebuild.move()

    if not (lost := _shrink(make, check)):
        raise error
    return lost


@contextmanager
def ends_with_losses(remedy: str) -> Iterator[None]:
    """Add a remedy to an error of the block if a lost rank is the cause. Local.

    For blocks outside of ``attempt``, where a lost rank ends the program.
    """
    try:
        yield
    except Exception as error:
        if not is_on() or not _is_of_loss(error):
            raise
        raise RankLostError(f"{error}; {remedy}") from error


def raise_lost(error: Exception) -> NoReturn:
    """Raise ``RankLostError`` with a remedy if a lost rank caused ``error``; else raise ``error``.

    Not collective. The message names the lost ranks that this rank knows.
    """
    if not is_on() or not _is_of_loss(error):
        raise error
    lost = survivors.failed(_ranks())
    is_named = isinstance(error, RankLostError) and not lost
    raise RankLostError(f"{error}; {_RESTART}" if is_named else _died(lost)) from error


def _died(lost: list[int]) -> str:
    who = f"{format_ranks(lost)} of {world.size()}" if lost else f"one of {world.size()} ranks"
    return f"{who} died, and the other ranks cannot continue without the lost state; {_RESTART}"


def _may_be_loss(error: BaseException) -> bool:
    """Return True if a lost rank may have caused an error; the ranks must then agree on the cause.

    MPI reports lost ranks by several error classes, some of which also have other causes.
    """
    return isinstance(error, CommError) or is_of_mpi(error) or _is_of_loss(error)


def _is_of_loss(error: BaseException) -> bool:
    """Return True if an error reports a lost rank, or if this rank knows that a rank is lost.

    In the second case any error counts: if a rank dies during a collective, the results of the
    collective are undefined and may cause any error.
    """
    return (
        isinstance(error, RankLostError) or is_loss(error) or survivors.has_detected_loss(_ranks())
    )


def _have_all_succeeded(*, has_succeeded: bool) -> bool:
    """Return, on all survivors, True if no rank has failed and no rank is lost. Collective.

    If this rank has failed, ranks that wait in this world raise an error. MPI does not detect a
    rank that is suspended or that has exited by itself, so all ranks end with exit code 87 if the
    call takes longer than ``HPCTRAIN_TIMEOUT``.
    """
    if not has_succeeded:
        _end_waits()
    with _limited(world.current().settings.timeout):
        return bool(survivors.agree(_ranks(), has_succeeded=has_succeeded))


def _shrink(
    make: "Callable[[MpiComm], object]", check: Callable[[list[int]], object] = lambda _: None
) -> list[int]:
    """Create the world of the survivors and return the lost ranks. Collective over the survivors.

    If the call takes longer than ``LIMIT_S``, all ranks end with exit code 87.

    Args:
        make: creates the next world from a communicator of its ranks; called again if more ranks
            die during the call.
        check: takes the lost ranks; raises an error, on all ranks, if the program cannot continue
            without these ranks.
    """
    before, ranks = world.current(), _ranks()
    lost: list[int] = []

    def make_world(left: "MpiComm") -> None:
        nonlocal lost
        lost = survivors.lost(ranks, left)
        check(lost)
        make(left)

    _end_waits()
    with _limited(LIMIT_S):
        left = survivors.shrink(ranks)
        if left.size == ranks.size:
            return []
        check(survivors.lost(ranks, left))
        if before.origin.spares is None:
            survivors.remake(left, make_world)
        else:
            before.origin.spares.replace(make_world)
    if world.rank() == 0:
        num_spares = world.size() - before.topology.size + len(lost)
        logger.warning(
            "%s of %d died; the %d survivors continue%s",
            *(format_ranks(lost), before.topology.size, world.size() - num_spares),
            f", with {num_spares} of the spares" if num_spares else "",
        )
    return lost


@contextmanager
def _limited(limit_s: float) -> Iterator[None]:
    """End all ranks with exit code 87 if the block takes longer than ``limit_s``."""
    hooks, presence = world.current().attachments.hooks, world.current().presence
    assert hooks is not None
    assert presence is not None

    def end() -> None:
        stopped = presence.processes.stopped()
        logger.error(
            "the survivors must agree within %g s, but %s; all ranks end",
            limit_s,
            f"a signal stopped {format_ranks(stopped)} of this node"
            if stopped
            else "a rank is stopped, or has exited with its own exit code",
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


def _end_waits() -> None:
    """Interrupt all waits in this world, on all ranks. Not collective."""
    survivors.revoke(_ranks())
    survivors.end_waits()
