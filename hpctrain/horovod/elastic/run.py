"""``elastic.run``, which resumes training after a failed operation, on all ranks or none."""

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


class AttemptEnd(enum.IntEnum):
    """Kind of outcome of an attempt to train, in order of severity."""

    DONE = 0
    UPDATED = 1  # hosts are added or removed
    MISMATCHED = 2  # ranks called different operations, perhaps after a failure on one rank
    FAILED = 3
    LOST = 4  # ranks have died, and the survivors form a smaller world


class Ending(NamedTuple):
    """Outcome of an attempt to train, on one rank or on all ranks."""

    end: AttemptEnd
    error: Exception | None = None
    skip_sync: bool = False
    text: str = ""  # errors by rank, in the outcome of all ranks
    result: Any = None


def agree(mine: Ending) -> Ending:
    """Return the most severe outcome of an attempt over all ranks.

    Collective; all ranks get the same outcome. If other ranks are still training, the all-gather
    of this rank does not match their next operation, which therefore fails on all ranks. The other
    ranks then also call ``agree``, and this rank repeats the all-gather.
    """
    here = world.current()
    if mine.end is not AttemptEnd.DONE:  # interrupt the ranks that wait for a named operation
        here.sets.break_off(f"rank {here.comm.rank} returned to its last commit: {mine.error}")
    outcome = (mine.end, mine.skip_sync, None if mine.error is None else str(mine.error))
    endings = _gather(here.comm, outcome)
    worst = max(end for end, _, _ in endings)
    text = by_rank([message if end == worst else None for end, _, message in endings])
    skip_sync = all(end is AttemptEnd.UPDATED and skip for end, skip, _ in endings)
    return Ending(worst, mine.error, skip_sync, text, mine.result)


def _gather(comm: Communicator, outcome: T) -> list[T]:
    comm.rejoin()
    try:
        return comm.allgather_object(outcome)
    except MismatchError:  # other ranks were still training; their next call is this all-gather
        comm.rejoin()
        return comm.allgather_object(outcome)


def run(func: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Decorate a training function so that it resumes after failed operations.

    The decorated function is collective. Its first argument is the ``State``, which is
    synchronized before each call of ``func``. If an operation raises ``HorovodInternalError`` on
    any rank, all ranks restore their last commit, call the reset callbacks, synchronize the state,
    and call ``func`` again. If hosts are added or removed (``HostsUpdatedInterrupt``), the ranks
    continue with the current state instead of the last commit. The decorated function returns
    after ``func`` has returned on all ranks. ``func`` must derive its position from the state.
    Between ``init()`` and the call, the program must not communicate.

    Other exceptions are raised unchanged. The loss of a rank ends all ranks with exit code 87
    (``RankLostError``): the job must resume from a checkpoint, not from a commit. With ``hpctrain
    launch --recover`` the survivors resume from their last commit instead, in the same processes,
    as a smaller world: ``rank()`` and ``size()`` change, process sets of some ranks are removed,
    and a ``DistributedOptimizer`` over all ranks is rebuilt, except with ``shard`` or Adasum. With
    ``--spares`` spare ranks replace lost ranks: spares run the program from ``init()``, and
    receive the state in ``sync()``.

    On several nodes there is one more case in which all ranks end, after ``HPCTRAIN_TIMEOUT``: one
    rank alone raises ``HorovodInternalError`` while others average gradients. Messages in flight
    between nodes cannot be cancelled.

    Raises:
        CommError: training fails repeatedly without a new commit, or more often than
            ``HPCTRAIN_ELASTIC_RESET_LIMIT`` allows; the cause is the last failure.
        ConfigError: with spares, the function is called twice, or the program has communicated
            before, other than by the constructors of optimizers.
        MismatchError: the ranks execute different operations; on every rank.
        NotInitializedError: ``hpctrain.init()`` was not called.
        RankLostError: all ranks that had the state are lost, and only spares remain.

    Source: Horovod 0.28, ``horovod.torch.elastic.run``.
    Differs: MPI is not started again, and spares are started with the other ranks; the ranks agree
    on the outcome of each attempt, so no rank returns while another repeats the attempt.
    """

    @functools.wraps(func)
    def training(state: S, *args: P.args, **kwargs: P.kwargs) -> R:
        def attempt(before: Ending | None) -> R:
            resets.synchronize()
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
            if together.end is AttemptEnd.MISMATCHED:
                raise _mismatch(together)
            resets.count(together)

    return cast("Callable[Concatenate[S, P], R]", training)


def _mismatch(ending: Ending) -> MismatchError:
    """Return the ``MismatchError`` of this rank, or else an error with the texts of all ranks."""
    error = ending.error
    return error if isinstance(error, MismatchError) else MismatchError(ending.text)


def _require_no_calls() -> None:
    """Raise ``ConfigError`` if there are spares and this rank has communicated before.

    A spare that replaces a lost rank later cannot join earlier communication.
    """
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
    """Run an attempt; return its outcome over all ranks that survive it.

    If ranks are lost, the survivors form a smaller world. Collective over the survivors. Errors of
    the program are raised unchanged.
    """
    together, lost, error = recovery.attempt(lambda: agree(_ending_of(attempt)))
    return together or Ending(AttemptEnd.LOST, error, text=f"{format_ranks(lost)} died")


def _ending_of(attempt: Callable[[], object]) -> Ending:
    try:
        return Ending(AttemptEnd.DONE, result=attempt())
    except HorovodInternalError as error:
        return Ending(AttemptEnd.FAILED, error)
    except MismatchError as error:  # the cause may be an earlier failure of another rank
        return Ending(AttemptEnd.MISMATCHED, error)
    except HostsUpdatedInterrupt as interrupt:
        return Ending(AttemptEnd.UPDATED, interrupt, interrupt.skip_sync)


MAX_FAILURES = 3
"""Maximum number of consecutive failures without a new commit."""


class Resets:
    """Synchronizes the ranks before each attempt to train, and counts the attempts.

    Args:
        state: state of the training.
    """

    def __init__(self, state: "State") -> None:
        self.number = 0
        self.has_state = world.current().is_first  # a spare has no state until the first sync
        self._state = state
        self._num_failures = 0
        self._commits = state.num_commits
        self._limit = world.current().settings.elastic_reset_limit

    def synchronize(self) -> None:
        """Synchronize the current ranks, including new spares, before an attempt. Collective.

        After this call, all ranks with a state have the same last commit.

        Raises:
            ConfigError: a spare has executed other operations than the workers before.
            RankLostError: no rank has the state; on every rank.
        """
        here = world.current()
        has_state = True
        try:
            here.rebuild.move()
            if self.number or here.origin.spares is not None:
                report = (self.number, self.has_state, self._state.num_commits)
                every = here.comm.allgather_object(report)
                self.number, has_state, _ = every[0]
                self._state.settle([num_commits for _, _, num_commits in every])
        except MismatchError as error:
            if here.origin.spares is None:
                raise
            raise ConfigError(f"{error}\n{SPARES_RULE}") from error
        if not has_state:
            raise RankLostError(
                f"a rank must have the state, but all ranks that had it are lost, and only "
                f"{here.topology.size} spares remain; restart from the last checkpoint, with more "
                f"ranks or spares"
            )
        here.last_call.note("elastic.run")

    def count(self, ending: Ending) -> None:
        """Count a reset, and log its reason on rank 0.

        Raises:
            CommError: a limit of resets is exceeded; on every rank.
        """
        is_failure = ending.end in (AttemptEnd.FAILED, AttemptEnd.LOST)
        if self._state.num_commits != self._commits or not is_failure:
            self._num_failures = 0
        self._commits = self._state.num_commits
        # Losses of ranks are not counted, because the number of ranks is finite.
        self._num_failures += ending.end is AttemptEnd.FAILED
        if self._limit is not None and self.number >= self._limit:
            raise CommError(
                f"training must not be reset more than {self._limit} times, but needs one more "
                f"reset: {ending.text}; remove the cause or increase HPCTRAIN_ELASTIC_RESET_LIMIT"
            ) from ending.error
        if self._num_failures > MAX_FAILURES:
            raise CommError(
                f"training must reach a commit in {MAX_FAILURES} resets, but failed each time "
                f"from the same commit, the last time with: {ending.text}; remove the cause"
            ) from ending.error
        self.number += 1
        if world.rank() == 0:
            how = "from the last commit" if is_failure else "from the current state"
            logger.warning("training resumes %s: %s", how, ending.text)
