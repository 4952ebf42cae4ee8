"""``elastic.run``: take training up again after a failed operation, on all ranks or on none."""

import contextlib
import enum
import functools
from collections.abc import Callable
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar, cast

from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import (
    CommError,
    ConfigError,
    HorovodInternalError,
    MismatchError,
    RankLostError,
)
from hpctrain.core.logs import logger
from hpctrain.core.units import by_rank, format_ranks
from hpctrain.horovod.elastic.state import HostsUpdatedInterrupt, State
from hpctrain.runtime import recovery, world
from hpctrain.runtime.initialization import SPARES_RULE

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
S = TypeVar("S", bound=State)

MAX_STRAYS = 1000  # operations that other ranks may still have under way when one wants to agree


class AttemptEnd(enum.IntEnum):
    """How an attempt has ended, the gravest last."""

    DONE = 0
    UPDATED = 1  # hosts come or go
    MET_OTHERS = 2  # an operation of this rank has met another one of a rank that had left the way
    FAILED = 3
    LOST = 4  # ranks have died, those that are left are a smaller world


class Ending(NamedTuple):
    """The end of an attempt on one rank, or on all together."""

    end: AttemptEnd
    error: Exception | None = None
    skip_sync: bool = False
    text: str = ""  # what went wrong, by rank; of all ranks together
    result: Any = None


def agree(mine: Ending) -> Ending:
    """Return how the attempt has ended on all ranks together: as on the rank it is worst on.

    Collective, the same result on every rank. A rank that comes here meets others that are still
    training in whatever they do next: both raise, the others come here as well, and this one
    tries again.
    """
    here = world.current()
    if (
        mine.end is not AttemptEnd.DONE
    ):  # fetches those who wait for a named operation of this rank
        here.sets.break_off(f"rank {here.comm.rank} left for its last commit: {mine.error}")
    told = (mine.end, mine.skip_sync, None if mine.error is None else str(mine.error))
    endings = _gather(here.comm, told)
    worst = max(end for end, _, _ in endings)
    text = by_rank([message if end == worst else None for end, _, message in endings])
    skip_sync = all(end is AttemptEnd.UPDATED and skip for end, skip, _ in endings)
    return Ending(worst, mine.error, skip_sync, text, mine.result)


def _gather(comm: Communicator, told: T) -> list[T]:
    for _ in range(MAX_STRAYS):
        with contextlib.suppress(MismatchError):
            return comm.allgather_object(told)
    return comm.allgather_object(told)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Let a training function survive failed operations; a decorator. The result is collective.

    Its first argument is the ``State``, which is synchronized before the function runs. When an
    operation fails by a ``HorovodInternalError``, on one rank or on all, every rank returns to
    its last commit, the reset callbacks run, the state is synchronized, and the function is
    called again. When hosts come or go (``HostsUpdatedInterrupt``), the same happens without the
    way back. The function returns when it has returned on all ranks; it must find in the state
    where it stands, and no operation with other ranks may come between ``init()`` and its call.

    Any other exception passes through. A lost rank ends all ranks with exit code 87
    (``RankLostError``): the job goes on from its checkpoint, not from a commit. Under ``hpctrain
    launch --recover`` those that are left go on from their last commit instead, in the same
    processes, as a smaller world: ``rank()`` and ``size()`` are other ones, process sets of some
    ranks are gone, and ``DistributedOptimizer`` over all ranks goes along, but with ``shard`` or
    Adasum. With ``--spares`` others take the place of lost ranks: they run the program from
    ``init()`` on, and get the state by its ``sync()``. Another end of all ranks, on several nodes
    and after ``HPCTRAIN_TIMEOUT``, is a ``HorovodInternalError`` that one rank raises by itself
    while others are averaging gradients: what is on its way between nodes cannot be taken back.

    Raises:
        CommError: training fails again and again without another commit, or more often than
            ``HPCTRAIN_ELASTIC_RESET_LIMIT`` allows; the last failure is its cause.
        ConfigError: with spares this is called twice, or more than optimizers communicate before.
        MismatchError: the ranks went different ways through the program; on every rank.
        NotInitializedError: ``hpctrain.init()`` was not called.
        RankLostError: all ranks are lost that had the state, and spares alone are left.

    Source: Horovod 0.28, ``horovod.torch.elastic.run``.
    Differs: MPI is not started again, and who replaces a rank was started with the others; the
    ranks agree how each attempt has ended, so none returns while another tries again.
    """

    @functools.wraps(func)
    def training(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        def attempt(before: Ending | None) -> R:
            resets.take_up()
            if before is not None and before.end in (AttemptEnd.FAILED, AttemptEnd.LOST):
                state.restore()
            if resets.number:
                state.on_reset()
            if before is None or not before.skip_sync:
                state.sync()
                resets.has_state = True
            return func(state, *args, **kwargs)

        _require_no_calls()
        resets, together = Resets(state), None
        while True:
            tried = functools.partial(attempt, together)
            together = _agreed_in_place(tried) if recovery.is_on() else agree(_ending_of(tried))
            if together.end is AttemptEnd.DONE:
                return cast("R", together.result)
            if together.end is not AttemptEnd.LOST:
                world.current().rebuild.renew()
            if together.end is AttemptEnd.MET_OTHERS:
                raise together.error or MismatchError(together.text)
            resets.count(together)

    return cast("Callable[Concatenate[S, P], R]", training)


def _require_no_calls() -> None:
    """Refuse what a spare could not do alone on its way here; where there are spares."""
    here = world.current()
    if here.origin.spares is None:
        return
    here.sets.global_controller.refuse("")
    what, ago_s = here.last_call.describe()
    if ago_s is None and here.rebuild.all_move:
        return
    if ago_s is None:
        what = "a group of torch.distributed or an asynchronous method"
    raise ConfigError(f"{SPARES_RULE}; got {what}")


def _agreed_in_place(attempt: Callable[[], object]) -> Ending:
    """Return how the attempt has ended on all ranks that are left; shrink the world if need be.

    Collective over those. A program's own error passes through, and ends all ranks.
    """
    together, lost, error = recovery.attempt(lambda: agree(_ending_of(attempt)))
    return together or Ending(AttemptEnd.LOST, error, text=f"{format_ranks(lost)} died")


def _ending_of(attempt: Callable[[], object]) -> Ending:
    try:
        return Ending(AttemptEnd.DONE, result=attempt())
    except HorovodInternalError as error:
        return Ending(AttemptEnd.FAILED, error)
    except MismatchError as error:  # perhaps met ranks that had failed already
        return Ending(AttemptEnd.MET_OTHERS, error)
    except HostsUpdatedInterrupt as interrupt:
        return Ending(AttemptEnd.UPDATED, interrupt, interrupt.skip_sync)


MAX_IN_VAIN = 3
"""Failures in a row with no commit between them, after which the same would happen for ever."""


class Resets:
    """Takes the training of one state up on all ranks, and counts how often that was again."""

    def __init__(self, state: "State") -> None:
        self.number = 0
        self.has_state = world.current().is_first  # a spare has none until the first sync
        self._state = state
        self._in_vain = 0
        self._commits = state.num_commits
        self._limit = world.current().settings.elastic_reset_limit

    def take_up(self) -> None:
        """Let all ranks come together that there are now, spares as well. Collective.

        From here on all that had it have the same last commit.

        ``ConfigError``: a spare does something else until it is here than the others have done.
        ``RankLostError``, on every rank: none has the state.
        """
        here = world.current()
        has_state = True
        try:
            here.rebuild.move()
            if self.number or here.origin.spares is not None:
                told = (self.number, self.has_state, self._state.num_commits)
                every = here.comm.allgather_object(told)
                self.number, has_state, _ = every[0]
                self._state.settle([num_commits for _, _, num_commits in every])
        except MismatchError as error:
            if here.origin.spares is None:
                raise
            raise ConfigError(f"{error}\n{SPARES_RULE}") from error
        if not has_state:
            raise RankLostError(
                f"all ranks that had the state are lost, and {here.topology.size} are left that "
                f"were spares; start again from the last checkpoint, with more ranks or spares"
            )
        here.last_call.note("elastic.run")

    def count(self, ending: Ending) -> None:
        """Count one more, and say on rank 0 why; ``CommError``, on all ranks, if one too many."""
        is_failure = ending.end in (AttemptEnd.FAILED, AttemptEnd.LOST)
        if self._state.num_commits != self._commits or not is_failure:
            self._in_vain = 0
        self._commits = self._state.num_commits
        self._in_vain += ending.end is AttemptEnd.FAILED  # who is lost is not lost again
        if self._limit is not None and self.number >= self._limit:
            raise CommError(
                f"training may be taken up again {self._limit} times and should be once more: "
                f"{ending.text}; remove the cause or raise HPCTRAIN_ELASTIC_RESET_LIMIT"
            ) from ending.error
        if self._in_vain > MAX_IN_VAIN:
            raise CommError(
                f"training was taken up again {MAX_IN_VAIN} times from the same commit and failed "
                f"each time, the last time with: {ending.text}; remove the cause, a retry does not"
            ) from ending.error
        self.number += 1
        if world.rank() == 0:
            how = "from the last commit" if is_failure else "as it stands"
            logger.warning("training is taken up again %s: %s", how, ending.text)
