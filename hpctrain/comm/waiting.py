"""Waits for other ranks, with back-off, detection of lost ranks, and a timeout."""

import logging
import math
import time
from array import array
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, NamedTuple, Protocol

from hpctrain.comm.flight_recorder import Call, CallStream, FlightRecorder, different_calls
from hpctrain.comm.node.segments import yield_core
from hpctrain.core.errors import CommError, MismatchError, NodeMemoryError, RankLostError

if TYPE_CHECKING:
    from mpi4py import MPI

    from hpctrain.comm.requests import MpiRequest


SPIN_S = 50e-6  # peers with equal work arrive within this time; a sleep costs about as much
LOOK_S = 0.1  # between two checks for lost ranks
SLEEP_SHARE = 0.02
"""Length of a sleep as a fraction of the time waited so far; bounds the relative delay."""
COMPARE_S = 1.0
"""After this wait in a collective, ranks of several nodes compare their calls."""
FAILED_S = 2.0
"""Delay between the failure of another rank of the communicator and the error of a wait. If the
failed rank does not catch its error, the program ends before, with the original message only."""
LATE_S = 3.0
"""After this wait for a rank of another node, a warning is logged, once per rank."""


class Pace(NamedTuple):
    """Durations of the phases of a wait: spin, yield the core, then sleep."""

    spin_s: float = SPIN_S
    yield_s: float = 0.0
    """Phase that yields the core between tests; a yield returns sooner than a sleep."""
    shortest_s: float = LOOK_S  # shortest and longest sleep; sleeps grow with the wait
    longest_s: float = LOOK_S

    def after(self, waited_s: float) -> "Pace":
        """Return the pace for the rest of a wait that has lasted ``waited_s``."""
        shortest_s = min(max(SLEEP_SHARE * waited_s, self.shortest_s), self.longest_s)
        if waited_s < self.spin_s + self.yield_s:
            return self._replace(shortest_s=shortest_s)
        return Pace(0.0, 0.0, shortest_s, self.longest_s)


IN_NODE = Pace()  # a post of the semaphore ends the sleep
BY_MPI = Pace(yield_s=2e-3, shortest_s=20e-6, longest_s=500e-6)
"""MPI does not wake a sleeping thread when a message arrives."""


def wait_until(
    done: Callable[[], object],
    look: Callable[[float], object],
    pace: Pace,
    *,
    sleep: Callable[[float], object] = time.sleep,
    timeout_s: float = math.inf,
) -> bool:
    """Wait until ``done()`` is true and return True; return False after ``timeout_s``.

    Args:
        done: tested repeatedly.
        look: called ten times per second with the seconds waited; may raise to end the wait.
        pace: durations of spinning, yielding and sleeping; sleeps grow with the wait.
        sleep: sleeps for the given seconds; returns True if the wait is over.
        timeout_s: longest wait.
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
        if sleep(min(max(SLEEP_SHARE * (now - start), pace.shortest_s), longest_s)) or done():
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
    """Wait for ``request`` as ``Watch.wait`` does; ``status`` receives the MPI status."""
    if not request.Test(status):
        watch.wait(partial(request.Test, status), partner=partner, over=over)


FindLost = Callable[[Collection[int] | None], None]
"""Raises ``RankLostError`` if one of the given ranks is lost; None means all ranks."""

_LOG = logging.getLogger(__name__)


def _assume_no_loss(ranks: Collection[int] | None) -> None:
    """No-op, for communicators without detection of lost ranks."""


class InStepError(Exception):
    """Error that all ranks raise at the same call; the communicator remains usable."""


class Notices(Protocol):
    """Sends failures of communicators to ranks with which this rank shares no memory."""

    def report_failure(
        self,
        number: int | None,
        ranks: Sequence[int] | None,
        reason: str,
        failed_on: int | None = None,
    ) -> None:
        """Report that a communicator has failed.

        Args:
            number: number of the communicator; None if its ranks need no report.
            ranks: ranks of the communicator in the world; None for all.
            reason: text of a ``MismatchError`` for all ranks to raise; empty for other errors.
            failed_on: world rank on which the failure occurred; None for this rank.
        """

    def failure(self, number: int) -> "tuple[int, str] | None":
        """Return the world rank on which a communicator has failed, and the reason, or None."""

    def exchange_calls(
        self, number: int, ranks: Sequence[int] | None, call: tuple[int, str], since_s: float
    ) -> Mapping[int, tuple[int, str]]:
        """Report the call in which this rank waits; return the reported calls of other ranks.

        Args:
            number: number of the communicator.
            ranks: ranks of the communicator in the world; None for all.
            call: number and description of the call.
            since_s: time at which this rank began the previous call.

        Returns:
            Number and description of a call by rank. Empty if the calls of the ranks may have
            diverged after ``since_s`` for a reason that another error reports.
        """


class Limit:
    """Limit of the duration of waits; another thread may change the limit, or end all waits.

    Args:
        timeout_s: longest wait.
        name: option that sets the limit, for messages.
    """

    __slots__ = ("broken_off", "late", "name", "on_late", "timeout_s")

    def __init__(self, timeout_s: float = math.inf, name: str = "HPCTRAIN_TIMEOUT") -> None:
        self.timeout_s = timeout_s
        self.name = name
        self.late = set[int]()
        """Ranks of other nodes whose lateness was logged."""
        self.broken_off = ""
        """Reason why waits must end; empty while waits are allowed."""
        self.on_late: Callable[[float], object] | None = None
        """Called at every check for lost ranks, with the seconds waited so far."""

    def check(self) -> None:
        """Raise ``CommError`` if another thread has ended the waits; see ``broken_off``."""
        if self.broken_off:
            raise CommError(self.broken_off)


class Watch:
    """Performs the waits of one communicator, and raises if a wait cannot end.

    The watch detects lost ranks, failures of the communicator, different calls and timeouts. All
    rank numbers are world ranks. All waiting loops of a communicator share one watch.

    Args:
        find_lost: raises ``RankLostError`` if a rank is lost.
        hosts: host name by rank, for messages.
        rank: this rank.
        timeout_s: longest wait, unless ``limit`` is given.
        ranks: ranks of the communicator; None for all of the world.
        limit: limit of waits, which several watches may share.
        recorder: records collectives.
        notices: reports failures between ranks without shared memory.
    """

    def __init__(  # noqa: PLR0913 - the ranks, the limit, and the reports
        self,
        find_lost: FindLost = _assume_no_loss,
        *,
        hosts: Mapping[int, str] | None = None,
        rank: int = 0,
        timeout_s: float = math.inf,
        ranks: Sequence[int] | None = None,
        limit: Limit | None = None,
        recorder: FlightRecorder | None = None,
        notices: Notices | None = None,
    ) -> None:
        self.waited_s = 0.0  # seconds that this watch has waited so far
        self._find_lost = find_lost
        self._hosts = hosts or {}
        self.rank = rank
        self._limit = limit or Limit(timeout_s)
        self.ranks = ranks
        self.recorder = recorder or FlightRecorder()
        self.calls: CallStream | None = None
        """Collectives of this communicator."""
        self.call_tag = 0  # first tag of the latest collective on a rail
        self.sign = memoryview(array("q", [0]))
        """One int64: 0, or 1 + the rank on which this communicator has failed. Ranks that share
        memory share the number, see ``SharedMemory``."""
        self.number: int | None = None
        """Number of the communicator, the same on all its ranks; None if the ranks need no
        notices."""
        self.on_fail: list[Callable[[], object]] = []
        """Functions called when a call of this rank fails, on the thread of the call."""
        self.mismatch: MismatchError | None = None
        """Error that all ranks have raised because their calls differed; None if none did."""
        self._notices = notices
        self._failure_seen_s: float | None = None
        self._has_lost = False  # whether a lost rank was detected

    def of_group(self, ranks: Sequence[int], limit: Limit | None = None) -> "Watch":
        """Return a watch for a group of ``ranks``; other ranks may leave without an error.

        Args:
            ranks: ranks in the communicator of this watch.
            limit: limit of waits; None for the limit of this watch.
        """
        return Watch(
            self._find_lost,
            hosts=self._hosts,
            rank=self.rank,
            ranks=ranks if self.ranks is None else [self.ranks[rank] for rank in ranks],
            limit=limit or self._limit,
            recorder=self.recorder,
            notices=self._notices,
        )

    def record_calls(self, ranks: Sequence[int]) -> None:
        """Start recording the collectives of a communicator of ``ranks``. Collective."""
        self.calls = self.calls or self.recorder.new_stream(ranks)

    def begin(self, call: Call, *, is_compared: bool = False) -> None:
        """Record that this rank begins ``call``.

        If ``is_compared`` is true, all ranks compare the call.
        """
        self.call_tag = call.tag
        if self.calls is not None:
            self.calls.begin(call.text)
            if is_compared:
                self.calls.compared = self.calls.number

    def wait(
        self,
        done: Callable[[], object],
        pace: Pace = BY_MPI,
        *,
        sleep: Callable[[float], object] = time.sleep,
        partner: int | None = None,
        over: str = "",
    ) -> None:
        """Wait until ``done`` is true, and sleep if a peer is late. Not collective.

        An error in the wait fails the communicator on this rank.

        Args:
            done: tested repeatedly.
            pace: durations of spinning, yielding and sleeping.
            sleep: sleeps for the given seconds; returns True if the wait is over.
            partner: rank that is waited for; None for all.
            over: name of the link to ``partner``, such as ``rail 0``; empty within a node.

        Raises:
            RankLostError: a rank is lost or has failed, or the wait exceeds the limit.
            MismatchError: another rank has made a different call.
        """
        start = time.perf_counter()
        if not pace.spin_s and pace.yield_s:  # if ranks outnumber cores, one yield often suffices
            yield_core()
            if done():
                self.waited_s += time.perf_counter() - start
                return
        if self.calls is not None:
            self.calls.waits_since_s = start
        try:
            wait_until(done, partial(self.look_in_step, partner, over), pace, sleep=sleep)
        except BaseException as error:  # other ranks may continue with data of this rank
            self.fail(error)
            raise
        finally:
            if self.calls is not None:
                self.calls.waits_since_s = None
        self.waited_s += time.perf_counter() - start

    def fail(self, error: BaseException | None = None) -> None:
        """Record that the communicator has failed on this rank; report the failure to other ranks.

        Other ranks see the report before data that this rank writes afterwards. The loss of a
        rank is not reported, since every rank detects the loss itself. If ``error`` is a
        ``MismatchError``, the other ranks raise the same error.
        """
        for function in self.on_fail:
            function()
        if self.sign[0]:
            return
        self.sign[0] = 1 + self.rank
        if self._notices is not None and not self._has_lost:
            reason = str(error) if isinstance(error, MismatchError) else ""
            self._notices.report_failure(self.number, self.ranks, reason)

    def free(self, comm: "MPI.Intracomm") -> None:
        """Free an MPI communicator unless this communicator has failed. Every rank must call it.

        After a failure a message may arrive late. MPI reuses the context of a freed communicator,
        and the new communicator would receive the message.
        """
        from hpctrain.comm import requests  # noqa: PLC0415 - a world of one needs no MPI

        with suppress(CommError):
            self.confirm()
        if not self.sign[0]:
            requests.free(comm)

    def fail_if_begun(self, error: BaseException, number: int) -> None:
        """Fail the communicator if ``error`` has interrupted a collective on this rank.

        Args:
            error: error of the call. Errors that all ranks raise do not fail the communicator.
            number: number of the latest collective before the call.
        """
        has_begun = self.calls is not None and self.calls.number != number
        if isinstance(error, Exception) and not has_begun:
            return
        if not isinstance(error, MismatchError | NodeMemoryError | InStepError):
            self.fail()

    def keep_in_step(self, function: Callable[[], object]) -> None:
        """Call ``function``; fail the communicator if an error interrupts its collectives."""
        number = 0 if self.calls is None else self.calls.number
        try:
            function()
        except BaseException as error:
            self.fail_if_begun(error, number)
            raise

    def require_in_step(self) -> None:
        """Raise ``CommError`` if the communicator is known to have failed. Not collective.

        Failures on other nodes are known once ``confirm`` has read their reports. After different
        calls, ``MismatchError`` is raised until ``mismatch`` is None: a program that caught the
        error and continued would otherwise get results of calls that do not belong together.
        """
        if self.sign[0]:
            raise self._failure()
        if self.mismatch is not None:
            raise MismatchError(
                f"{self.mismatch}; this error of an earlier call has ended the communicator: end "
                f"the program, or make a new world by shutdown() and init() on every rank"
            )

    def confirm(self) -> None:
        """Raise ``CommError`` if the communicator has failed on any rank. Not collective.

        Must be called after messages were received: a failed rank may have changed buffers while
        the buffers were sent.
        """
        if self._notices is not None and self.number is not None:
            found = self._notices.failure(self.number)
            if found is not None and not self.sign[0]:
                self.sign[0] = 1 + found[0]
                self._notices.report_failure(self.number, self.ranks, found[1], found[0])
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
            # On one node the shared sign shows a failure before the report arrives.
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
        """Call ``look``; also raise if the communicator has failed, or calls of ranks differ."""
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
        """Raise ``MismatchError`` if another rank reports a different call of the same number.

        Ranks of one node compare each call when they begin it. Between nodes, this would add a
        message to each reduction, so only ranks that wait report their call.
        """
        mine = calls.recent()  # read once: another thread may begin a call concurrently
        if self._notices is None or self.number is None or not mine:
            return
        last = max(mine)
        since_s = mine.get(last - 1, ("", -math.inf))[1]
        found = self._notices.exchange_calls(
            self.number, self.ranks, (last, mine[last][0]), since_s
        )
        for rank, (number, text) in found.items():
            own = mine.get(number, (text,))[0]
            if own != text and number > calls.compared:
                raise different_calls(
                    f"{own} on {self._name(self.rank)} and {text} on {self._name(rank)} as call "
                    f"{number} of {calls.name}"
                )

    def look(self, waited_s: float, partner: int | None = None, over: str = "") -> None:
        """Check for lost ranks and for the limit after a wait of ``waited_s``. Not collective.

        Args:
            waited_s: seconds waited so far.
            partner: rank that is waited for; None for all.
            over: name of the link to ``partner``, such as ``rail 0``; empty within a node.

        Raises:
            RankLostError: a rank is lost, or the wait exceeds the limit.
            CommError: another thread has ended all waits.
        """
        limit = self._limit
        limit.check()
        try:
            self._find_lost(self.ranks if partner is None else (partner,))
        except RankLostError:
            self._has_lost = True
            raise
        if limit.on_late is not None:
            limit.on_late(waited_s)
        if waited_s > limit.timeout_s:
            raise RankLostError(
                f"a wait for other ranks must end within {limit.name}={limit.timeout_s:g} s, but "
                f"{self._wait_text(waited_s, partner, over)}; check that rank and the link, "
                f"or set {limit.name} to more seconds"
            )
        if partner is not None and over and waited_s > LATE_S and partner not in limit.late:
            limit.late.add(partner)
            _LOG.warning(
                "%s; that rank is busy, or the link does not respond",
                self._wait_text(waited_s, partner, over),
            )

    def _wait_text(self, waited_s: float, partner: int | None, over: str) -> str:
        me = self._name(self.rank)
        whom = "the other ranks" if partner is None else self._name(partner)
        return f"{me} has waited {waited_s:.0f} s for {whom}{' over ' if over else ''}{over}"

    def _name(self, rank: int) -> str:
        return f"rank {rank} on {self._hosts[rank]}" if rank in self._hosts else f"rank {rank}"
