"""Waiting for other ranks: one back-off for all loops, with an eye on the others."""

import logging
import math
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast

from hpctrain.comm.flight_recorder import Call, CallStream, FlightRecorder
from hpctrain.comm.node.segments import yield_core
from hpctrain.core.errors import CommError, MismatchError, NodeMemoryError, RankLostError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.requests import MpiRequest

Method = TypeVar("Method", bound=Callable[..., Any])

SPIN_S = 50e-6  # peers that do the same work arrive within this time; sleeping costs about as much
LOOK_S = 0.1  # between two looks at the others
NAP_SHARE = 0.02
"""Naps are this share of the time waited so far: so late, at most, is the end noticed."""
COMPARE_S = 1.0
"""Ranks of several nodes that wait so long in a collective compare which one that is."""
FAILED_S = 2.0
"""A wait ends so long after another rank of the communicator has failed: an error that no rank
catches ends the program meanwhile, and its message is the useful one."""
LATE_S = 3.0
"""A rank that waits for another node for so long says so, once for each rank it waits for."""


class Pace(NamedTuple):
    """How long a wait stays awake, and its naps afterwards."""

    spin_s: float = SPIN_S  # busy
    yield_s: float = 0.0
    """Giving the core to whoever wants it between two tries: sooner back than from a nap."""
    shortest_s: float = LOOK_S
    longest_s: float = LOOK_S

    def after(self, waited_s: float) -> "Pace":
        """Return that of a wait which is a part of one that has lasted for so long."""
        shortest_s = min(max(NAP_SHARE * waited_s, self.shortest_s), self.longest_s)
        if waited_s < self.spin_s + self.yield_s:
            return self._replace(shortest_s=shortest_s)
        return Pace(0.0, 0.0, shortest_s, self.longest_s)


IN_NODE = Pace()  # the nap ends by itself when the peer has come
BY_MPI = Pace(yield_s=2e-3, shortest_s=20e-6, longest_s=500e-6)
"""Nobody wakes who waits for a message of MPI."""


def wait_until(
    done: Callable[[], object],
    look: Callable[[float], object],
    pace: Pace,
    *,
    nap: Callable[[float], object] = time.sleep,
    timeout_s: float = math.inf,
) -> bool:
    """Say whether it is done in time: awake for a moment, then in naps that grow with the wait.

    ``look`` is told the seconds waited, ten times a second, and raises to end the wait; ``nap``
    sleeps for so many seconds, and is true where the wait is over.
    """
    start = now = time.perf_counter()
    end = start + timeout_s
    awake_until = min(start + pace.spin_s, end)
    while now < awake_until:
        if done():
            return True
        now = time.perf_counter()
    awake_until = min(now + pace.yield_s, end)
    while now < awake_until:
        yield_core()
        if done():
            return True
        now = time.perf_counter()
    next_look = start + LOOK_S
    while now < end:
        longest_s = min(pace.longest_s, end - now)
        if nap(min(max(NAP_SHARE * (now - start), pace.shortest_s), longest_s)) or done():
            return True
        now = time.perf_counter()
        if now >= next_look:
            look(now - start)
            next_look = now + LOOK_S
    return False


def wait_request(
    request: "MpiRequest",
    watch: "Watch",
    partner: int | None = None,
    over: str = "",
    status: "MPI.Status | None" = None,
) -> None:
    """Return when a request is complete, see ``Watch.wait``; ``status`` is told what has come."""
    if not request.Test(status):
        watch.wait(partial(request.Test, status), partner=partner, over=over)


FindLost = Callable[[Collection[int] | None], None]
"""Raises ``RankLostError`` if one of these ranks is lost, for None any; see ``Liveness.check``."""

_LOG = logging.getLogger(__name__)


def _nobody_is_lost(ranks: Collection[int] | None) -> None:
    """Look for nobody: what communicators without a world do."""


class InStepError(Exception):
    """An error that all ranks raise after they have met, so that they remain in step."""


class Notices(Protocol):
    """Reports of ranks that a communicator has failed; for ranks that share no memory."""

    def report_failure(
        self, number: int, ranks: Sequence[int] | None, reason: str, *, is_own: bool = True
    ) -> None:
        """Report that the communicator ``number`` has failed, on this rank unless not ``is_own``.

        ``ranks`` are those of the communicator in the world, None for all. ``reason`` is the text
        of a ``MismatchError`` that all of them should raise, empty for another error.
        """

    def failure(self, number: int) -> "tuple[int, str] | None":
        """Return a rank of the world on which a communicator has failed, and why; else None."""

    def exchange_calls(
        self, number: int, ranks: Sequence[int] | None, call: tuple[int, str], since_s: float
    ) -> Mapping[int, tuple[int, str]]:
        """Report the call, with its number, in which this rank waits; return those of the others.

        Empty if ranks may have diverged since ``since_s`` for a reason that they report otherwise.
        """


class Limit:
    """How long the waits of a watch may last; another thread may change it, or end them all."""

    __slots__ = ("broken_off", "name", "on_late", "timeout_s")

    def __init__(self, timeout_s: float = math.inf, name: str = "HPCTRAIN_TIMEOUT") -> None:
        """Take the seconds, and what the user sets them by."""
        self.timeout_s = timeout_s
        self.name = name
        self.broken_off = ""
        """Why nobody may wait any more; empty as long as that is not so."""
        self.on_late: Callable[[float], object] | None = None
        """Is told the seconds waited, with every look at the others."""

    def check(self) -> None:
        """Raise ``CommError`` if nobody may wait any more."""
        if self.broken_off:
            raise CommError(self.broken_off)


class Watch:
    """Looks for lost ranks, names those that are late, and ends a wait that lasts too long.

    Ranks are those of the world. All waiting loops of a communicator share one watch.
    """

    def __init__(  # noqa: PLR0913 - who waits for whom, how long, and who hears of it
        self,
        find_lost: FindLost = _nobody_is_lost,
        *,
        hosts: Mapping[int, str] | None = None,
        rank: int = 0,
        timeout_s: float = math.inf,
        ranks: Sequence[int] | None = None,
        limit: Limit | None = None,
        recorder: FlightRecorder | None = None,
        notices: Notices | None = None,
    ) -> None:
        """Take what is needed to tell who is waited for, and on which node each rank is."""
        self.waited_s = 0.0  # seconds that this process has waited so far
        self._find_lost = find_lost
        self._hosts = hosts or {}
        self.rank = rank
        self._limit = limit or Limit(timeout_s)
        self._ranks = ranks
        """Those that are waited for where nobody says more; None for all of the world."""
        self._named: set[int] = set()
        self.recorder = recorder or FlightRecorder()
        self.calls: CallStream | None = None
        """Of the communicator whose waits these are."""
        self.call_tag = 0  # of messages of the last one on a rail
        self._num_compared = 0  # collectives up to the last one in which all ranks compare it
        self.sign = memoryview(array("q", [0]))
        """One number: 0, or 1 + the rank of the world on which this communicator has failed. Ranks
        that share memory share the number, see ``SharedMemory``."""
        self.number: int | None = None
        """The number of the communicator, the same on all its ranks, where they need notices."""
        self.on_fail: list[Callable[[], object]] = []
        """Called when a call of this rank fails, on the thread that has made the call."""
        self._notices = notices
        self._failure_seen_s: float | None = None
        self._has_lost = False  # whether a rank was found to be lost

    def of_group(self, ranks: Sequence[int], limit: Limit | None = None) -> "Watch":
        """Return a watch over some ranks of the world: that others leave does not concern it.

        Its waits have the same limit if they have none of their own.
        """
        return Watch(
            self._find_lost,
            hosts=self._hosts,
            rank=self.rank,
            ranks=ranks,
            limit=limit or self._limit,
            recorder=self.recorder,
            notices=self._notices,
        )

    def record_calls(self, ranks: Sequence[int]) -> None:
        """Let collectives be recorded, of a communicator of these ranks. Collective over them."""
        self.calls = self.calls or self.recorder.new_stream(ranks)

    def begin(self, call: Call, *, is_compared: bool = False) -> None:
        """Note that this rank comes to its next collective, which all ranks may compare there."""
        self.call_tag = call.tag
        if self.calls is not None:
            self.calls.begin(call.text)
            if is_compared:
                self._num_compared = self.calls.number

    def wait(
        self,
        done: Callable[[], object],
        pace: Pace = BY_MPI,
        *,
        nap: Callable[[float], object] = time.sleep,
        partner: int | None = None,
        over: str = "",
    ) -> None:
        """Return when it is done, without burning the core while a peer is late; see ``look``.

        After an error nothing of this communicator is done on this rank any more.
        """
        start = time.perf_counter()
        if not pace.spin_s and pace.yield_s:  # where ranks take turns, one turn is often all
            yield_core()
            if done():
                self.waited_s += time.perf_counter() - start
                return
        if self.calls is not None:
            self.calls.waits_since_s = start
        try:
            wait_until(done, partial(self.look_in_step, partner, over), pace, nap=nap)
        except BaseException as error:  # the others may continue with what this rank has given
            self.fail(error)
            raise
        finally:
            if self.calls is not None:
                self.calls.waits_since_s = None
        self.waited_s += time.perf_counter() - start

    def fail(self, error: BaseException | None = None) -> None:
        """Record that this rank is no longer in step with the others, and report that to them.

        Whatever the others read of this rank afterwards, they see the report first. Not reported
        is the loss of a rank, which all ranks find by themselves. If ``error`` is a
        ``MismatchError``, the others raise it, too.
        """
        for function in self.on_fail:
            function()
        if self.sign[0]:
            return
        self.sign[0] = 1 + self.rank
        if self._notices is not None and self.number is not None and not self._has_lost:
            reason = str(error) if isinstance(error, MismatchError) else ""
            self._notices.report_failure(self.number, self._ranks, reason)

    def free(self, comm: "MPI.Intracomm") -> None:
        """Free a communicator of MPI, but not after a failure; every rank calls this.

        What a rank has sent and no other has received may arrive later. MPI gives the number of a
        communicator that was freed to a new one, which would receive it.
        """
        from hpctrain.comm import requests  # noqa: PLC0415 - a world of one needs no MPI

        with suppress(CommError):
            self.confirm()
        if not self.sign[0]:
            requests.free(comm)

    def fail_halfway(self, error: BaseException, number: int) -> None:
        """Do what ``fail`` does after an ``error`` of a call that this rank alone has begun.

        ``number`` is that of the last collective before the call.
        """
        has_begun = self.calls is not None and self.calls.number != number
        if isinstance(error, Exception) and not has_begun:
            return
        if not isinstance(error, MismatchError | NodeMemoryError | InStepError):
            self.fail()

    def keep_in_step(self, function: Callable[[], object]) -> None:
        """Call a function of collectives; fail the communicator where an error ends it halfway."""
        number = 0 if self.calls is None else self.calls.number
        try:
            function()
        except BaseException as error:
            self.fail_halfway(error, number)
            raise

    def require_in_step(self) -> None:
        """Raise ``CommError`` if the communicator has failed on a rank. Not collective.

        Ranks of other nodes are known as far as this rank has received their notices.
        """
        if self.sign[0]:
            raise self._failure()

    def confirm(self) -> None:
        """Raise ``CommError`` if a rank has failed, also one of another node. Not collective.

        To be called after messages of others were received: what a failed rank has sent may have
        changed since it failed.
        """
        if self._notices is not None and self.number is not None:
            found = self._notices.failure(self.number)
            if found is not None and not self.sign[0]:
                self.sign[0] = 1 + found[0]
                self._notices.report_failure(self.number, self._ranks, found[1], is_own=False)
        if self.sign[0]:
            raise self._failure()

    def _failure(self) -> CommError:
        rank = self.sign[0] - 1
        remedy = (
            "no longer in step; end the program, or make a new world by shutdown() and init() on "
            "every rank"
        )
        if rank == self.rank:
            return CommError(
                f"all ranks must complete each call of a communicator, but a call of this one has "
                f"failed on {self._name(rank)} before, so that its ranks are {remedy}"
            )
        if self._notices is not None and self.number is not None:
            # A rank of this node is seen to have failed before its report arrives.
            report = partial(self._notices.failure, self.number)
            wait_until(report, lambda _: None, BY_MPI, timeout_s=LOOK_S)
            if (found := report()) and found[1]:
                return MismatchError(found[1])
        return RankLostError(
            f"all ranks must complete each call of a communicator, but a call of this one has "
            f"failed on {self._name(rank)}, so that {self._name(self.rank)} and that rank are "
            f"{remedy}; the error of rank {rank} gives the reason"
        )

    def look_in_step(self, partner: int | None, over: str, waited_s: float) -> None:
        """Do what ``look`` does, and raise where the communicator has failed on another rank."""
        self.look(waited_s, partner, over)
        try:
            self.confirm()
        except CommError as error:
            now = time.perf_counter()
            self._failure_seen_s = self._failure_seen_s or now
            if now - self._failure_seen_s > FAILED_S or isinstance(error, MismatchError):
                raise
        else:
            if waited_s > COMPARE_S and self.calls is not None:
                self._compare_calls(self.calls)

    def _compare_calls(self, calls: CallStream) -> None:
        """Raise ``MismatchError`` if another rank is, or was, in a different call in place of one.

        Ranks of one node compare each call before they begin it. Between nodes that would be one
        more message for a reduction, so ranks that wait report their call to each other.
        """
        mine = calls.recent()  # one look: another thread may begin a call meanwhile
        if self._notices is None or self.number is None or not mine:
            return
        last = max(mine)
        since_s = mine.get(last - 1, ("", -math.inf))[1]
        found = self._notices.exchange_calls(
            self.number, self._ranks, (last, mine[last][0]), since_s
        )
        for rank, (number, text) in found.items():
            own = mine.get(number, (text,))[0]
            if own != text and number > self._num_compared:
                raise different_calls(
                    f"{own} on {self._name(self.rank)} and {text} on {self._name(rank)} as call "
                    f"{number} of {calls.name}"
                )

    def look(self, waited_s: float, partner: int | None = None, over: str = "") -> None:
        """Return if there is reason to wait on; cheap enough for every turn of a waiting loop.

        ``partner`` is the rank that is waited for, None for all; ``over`` the link to it, such as
        ``rail 0``, empty inside a node. ``RankLostError`` if a rank is lost, or the wait has
        lasted too long.
        """
        limit = self._limit
        limit.check()
        try:
            self._find_lost(self._ranks if partner is None else (partner,))
        except RankLostError:
            self._has_lost = True
            raise
        if limit.on_late is not None:
            limit.on_late(waited_s)
        if waited_s > limit.timeout_s:
            raise RankLostError(
                f"{self._who(waited_s, partner, over)}, longer than {limit.name}="
                f"{limit.timeout_s:g} allows; see what that rank does and whether the link works, "
                f"or set {limit.name} to more seconds"
            )
        if partner is not None and over and waited_s > LATE_S and partner not in self._named:
            self._named.add(partner)
            _LOG.warning(
                "%s; it is busy with something else, or the link is silent",
                self._who(waited_s, partner, over),
            )

    def _who(self, waited_s: float, partner: int | None, over: str) -> str:
        me = self._name(self.rank)
        whom = "the other ranks" if partner is None else self._name(partner)
        return f"{me} has waited {waited_s:.0f} s for {whom}{' over ' if over else ''}{over}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}" if rank in self._hosts else f"rank {rank}"


def different_calls(found: str) -> MismatchError:
    """Return the error for ranks that make the calls that are ``found``."""
    return MismatchError(
        f"ranks must make the same calls in the same order, got {found}; let every rank take the "
        f"same path through the program, with tensors of the same shape and dtype"
    )


def in_step(method: Method) -> Method:
    """Fail the communicator where an exception ends ``method``, a collective, halfway."""

    @wraps(method)
    def call(self: Any, *args: Any, **options: Any) -> Any:
        number = self._watch.calls.number
        try:
            return method(self, *args, **options)
        except BaseException as error:
            self._watch.fail_halfway(error, number)
            raise

    return cast("Method", call)
