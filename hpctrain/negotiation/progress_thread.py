"""Progress thread: a waiting caller polls, else a thread that sleeps in between."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from hpctrain.comm.eager import eager
from hpctrain.core.errors import CommError, RankLostError

if TYPE_CHECKING:
    from hpctrain.comm.control_channel.mailbox import Mailbox
    from hpctrain.negotiation.handle import Handle
    from hpctrain.negotiation.progress_engine import ProgressEngine

TICK_S = 1.0
"""Between two looks for what has lasted too long, and for questions of other ranks."""
_BURST_S, _MOST_CYCLES = 100e-6, 50
"""Between two operations of a burst, at most; and how many times it may last so long."""
EVICT_S = 10.0
"""Longest wait at the end for a caller whose operation does not come back."""


class ProgressThread:
    """Lets one thread at a time drive a ``ProgressEngine``.

    A caller who waits drives on his own thread: no other has to wake up for it. The driver's
    thread takes over what nobody waits for, and lets go as soon as a caller comes.
    """

    def __init__(
        self,
        progress: "ProgressEngine",
        post: "Mailbox",
        *,
        cycle_s: float,
        timeout_s: float,
        has_thread: bool,
    ):
        """Start the thread, if there is one for what nobody waits for."""
        self._progress, self._post = progress, post
        self._cycle_s, self._timeout_s = cycle_s, timeout_s
        lock = threading.Lock()
        self._given_up = threading.Condition(lock)
        """Told when nobody drives any more, and when something was carried out."""
        self._wanted = threading.Condition(lock)
        """Told when the thread has something to do."""
        self._is_driven = self._is_asleep = self._is_idle = False
        self._num_callers = 0
        self._next_look = time.monotonic() + TICK_S
        self._is_open = True
        self._thread: threading.Thread | None = None
        if has_thread:
            self._thread = threading.Thread(
                target=self._drive_for_nobody, name="hpctrain-named", daemon=True
            )
            self._thread.start()

    @eager
    def finish(self, handle: "Handle") -> None:
        """Return when an operation is done; the calling thread drives meanwhile."""
        since = time.monotonic()

        def check() -> None:
            waited_s = time.monotonic() - since
            if waited_s > self._timeout_s:
                raise RankLostError(
                    f"rank {self._post.tree.rank} has waited {waited_s:.0f} s for the others to "
                    f"submit {handle.name}, longer than HPCTRAIN_TIMEOUT={self._timeout_s:g} "
                    f"allows; see what they do, or set HPCTRAIN_TIMEOUT to more seconds"
                )

        self.until(lambda: handle.is_done, check)

    def until(self, is_over: Callable[[], bool], check: Callable[[], None]) -> None:
        """Return when it is over; drive until then, unless somebody else does.

        ``check``, which may raise, is called every second or so.
        """
        with self._given_up:
            self._num_callers += 1
        drives = False
        try:
            with self._given_up:
                while self._is_driven and not is_over():
                    self._post.ring()
                    if not self._given_up.wait(TICK_S):
                        check()
                if not is_over():
                    self._is_driven = drives = True
            if drives:
                self._drive(is_over, check)
        finally:
            with self._given_up:
                self._num_callers -= 1
                self._pass_on(drives=drives)

    def nudge(self) -> None:
        """See to what has just been submitted, without waiting for it."""
        if self._is_driven:
            if self._is_asleep:
                self._post.ring()
        elif self._is_idle:
            with self._wanted:
                self._is_idle = False  # told once: it may be long until it has Python's lock
                self._wanted.notify()
        elif self._thread is None:
            self.look()

    def look(self) -> None:
        """Do what can be done without waiting, where there is no thread for it."""
        with self._given_up:
            if self._is_driven or self._thread is not None:
                return
            self._is_driven = True
        try:
            self._drive(lambda: True, _nothing)
        finally:
            with self._given_up:
                self._pass_on(drives=True)

    def close(self) -> None:
        """End the thread and wait for callers to go, as nothing can go on; nobody drives then."""
        with self._given_up:
            self._is_open = False
            self._num_callers += 1  # so that this one is told
            self._wanted.notify_all()
        self._post.ring()
        if self._thread is not None:
            self._thread.join()
        end = time.monotonic() + EVICT_S
        with self._given_up:
            while self._is_driven and time.monotonic() < end:
                self._post.ring()
                self._given_up.wait(TICK_S)
            self._is_driven = True

    def _drive(self, is_over: Callable[[], bool], check: Callable[[], None]) -> None:
        """Turn until it is over; sleep while nothing happens. For who has set ``_is_driven``."""
        progress, post = self._progress, self._post
        if progress.broken is not None:
            progress.fail_all(progress.broken)
            return
        try:
            while True:
                self._turn()
                if time.monotonic() >= self._next_look:
                    self._next_look = time.monotonic() + TICK_S
                    if not is_over():
                        check()
                    progress.check_stalls()
                    self._turn()
                if is_over():
                    return
                self._is_asleep = True  # from here on whoever submits rings
                if not (progress.news or progress.to_ask):
                    post.sleep(TICK_S)
                self._is_asleep = False
        except BaseException as error:  # messages may be lost: nothing can go on
            progress.break_down(error)
            raise

    def _turn(self) -> None:
        if self._progress.turn() and self._num_callers > 1:
            with self._given_up:
                self._given_up.notify_all()

    def _drive_for_nobody(self) -> None:
        while self._is_open and self._progress.broken is None:
            if not self._take_over():
                continue
            try:
                self._drive(self._is_unneeded, _nothing)
            except CommError:
                pass  # those who wait are told, and whoever asks next
            finally:
                with self._given_up:
                    self._pass_on(drives=True)

    def _take_over(self) -> bool:
        """Wait until the thread is needed, or for a tick; say whether it drives now."""
        with self._wanted:
            self._is_idle = True
            if self._is_driven or self._num_callers or not self._progress.has_work():
                self._wanted.wait(TICK_S)
            self._is_idle = False
            self._let_burst_pass()
            if self._is_driven or self._num_callers or not self._is_open:
                return False
            self._is_driven = True
            return True

    def _let_burst_pass(self) -> None:
        """Wait while more and more is submitted: a program that submits needs Python's lock."""
        news = self._progress.news
        for _ in range(_MOST_CYCLES):
            num_news = len(news)
            if not num_news or self._is_driven or self._num_callers or not self._is_open:
                return
            self._wanted.wait(max(self._cycle_s, _BURST_S))  # nobody tells of news now
            if len(news) == num_news:
                return

    def _is_unneeded(self) -> bool:
        """Say whether the thread lets go: for good, for a caller, or for a cycle."""
        progress = self._progress
        return bool(
            self._num_callers or progress.news or not progress.is_awaited or not self._is_open
        )

    def _pass_on(self, *, drives: bool) -> None:
        """Let another drive, if this one does or nobody; for who holds the lock."""
        if drives:
            self._is_driven = self._is_asleep = False
        if self._is_driven:
            return
        if self._num_callers:
            self._given_up.notify_all()
        elif self._is_idle and self._progress.has_work():
            self._wanted.notify()


def _nothing() -> None:
    """Check nothing."""
