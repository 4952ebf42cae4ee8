"""Lease on a directory, so that only one job at a time writes into it, on any file system.

The lease needs neither file locks nor synchronized clocks. The lease file is created exclusively,
or replaced atomically. The holder of the lease increments a counter, and a waiting process
measures with its own clock how long that counter has not changed.
"""

import json
import os
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from platform import node
from secrets import token_hex
from typing import NamedTuple

from hpctrain.cluster.env import job_id
from hpctrain.cluster.process import birth, identity
from hpctrain.core.atomic import PART, publishing, sync
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.core.logs import warn_once
from hpctrain.core.python_compat import Self
from hpctrain.launch.slurm.scheduler import restart_count

NAME = "lease.json"
BEAT = ".beat"


@dataclass(frozen=True, kw_only=True, slots=True)
class Times:
    """Intervals and limits of a lease, in seconds."""

    beat_s: float = 5.0  # between two heartbeats of the holder
    stale_s: float = 30.0
    """Time without a heartbeat after which another process may take the lease."""
    wait_s: float = 60.0  # maximum wait for a holder that is alive
    look_s: float = 1.0
    """Time between checks of the lease file; until the next check, the holder may write."""
    settle_s: float = 2.0
    """Wait before a new holder writes, so that a former holder that is alive notices the loss."""


TIMES = Times()


class LeaseRemedies(NamedTuple):
    """Remedies for errors about a lease of another process."""

    held: str  # the holder is alive
    gone: str  # the lease file of this process is missing
    taken: str  # another process has taken the lease of this process


OF_RUN = LeaseRemedies(
    held=(
        "wait for its end, choose another folder with --set output_dir=…, or end it with "
        "--force and resume from its last checkpoint"
    ),
    gone=(
        "hpctrain status shows the state of the run, --resume continues from its last checkpoint"
    ),
    taken="to continue both jobs, choose another folder for one of them with --set output_dir=…",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Process that holds a lease: the content of the lease file."""

    host: str
    job: str  # id of the job; empty outside of jobs
    restarts: int  # how often Slurm has restarted the job
    pid: int  # process id of rank 0
    born: int | None
    """Start of the process in clock ticks since boot: process ids are reused."""
    namespace: tuple[str, int]  # PID namespace of ``pid``
    since: str
    token: str  # unique

    @classmethod
    def here(cls) -> Self:
        """Return a holder that describes this process, with a new token."""
        return cls(
            host=node(),
            job=job_id(),
            restarts=restart_count(),
            born=birth(os.getpid()),
            **identity()._asdict(),
            since=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
            token=token_hex(8),
        )

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return the holder of the lease on a directory; None without a valid lease file."""
        with suppress(OSError):
            return cls.parse((folder / NAME).read_bytes())
        return None

    @classmethod
    def parse(cls, text: bytes) -> Self | None:
        """Parse the content of a lease file; None if the content is invalid."""
        try:
            found = json.loads(text)
            boot, number = found["namespace"]
            is_valid = 0 < int(found["pid"]) < 1 << 31 and str(found["token"]).isalnum()
            found |= {"restarts": int(found["restarts"]), "namespace": (boot, number)}
            return cls(**found) if is_valid else None
        except (ValueError, TypeError, KeyError):
            return None

    def is_gone(self, seen_by: "Holder") -> bool:
        """Return True if the process ``seen_by`` can be certain that the holder has ended."""
        if self.namespace == seen_by.namespace and self.born is not None:
            try:
                os.kill(self.pid, 0)
            except PermissionError:
                return False  # a process of another user, possibly hidden in /proc
            except OSError:
                return True
            return birth(self.pid) != self.born
        return bool(self.job) and self.job == seen_by.job and self.restarts < seen_by.restarts

    def describe(self) -> str:
        """Return one line with the job, process and host of the holder."""
        again = f", restart {self.restarts}" if self.restarts else ""
        job = f"job {self.job}{again}, " if self.job else ""
        return f"{job}process {self.pid} on {self.host} (since {self.since})"


class Silence:
    """Measure the time since the last heartbeat of another process, with the local clock.

    Args:
        longest_s: maximum time in seconds that is counted between two consecutive checks. A longer
            pause means that the file system or this process was blocked, and possibly the other
            process too.
    """

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._looked_at: float | None = None
        self._sign: object = None
        self.quiet_s = self.waited_s = 0.0

    def passed(self) -> float:
        """Return the seconds since the last call, at most ``longest_s``; 0 in the first call."""
        before, self._looked_at = self._looked_at, time.monotonic()
        return min(self._looked_at - (before or self._looked_at), self._longest_s)

    def look(self, sign: object, passed_s: float) -> bool:
        """Return True if the heartbeat ``sign`` changed; else add ``passed_s`` to ``quiet_s``."""
        is_alive = sign != self._sign
        self._sign, self.quiet_s = sign, 0.0 if is_alive else self.quiet_s + passed_s
        self.waited_s += passed_s
        return is_alive


class Lease:
    """Lease of this process on a directory.

    A thread of the holder increments a counter. The counter has its own file, so a holder that has
    not noticed the loss of its lease never overwrites the lease file of another process. The
    thread also runs while the main thread hangs, so a hanging process keeps its lease until the
    launcher ends the process.

    Args:
        folder: the directory.
        times: intervals and limits.
        remedies: remedies that error messages name; they depend on the kind of directory.
    """

    def __init__(
        self, folder: Path, times: Times = TIMES, *, remedies: LeaseRemedies = OF_RUN
    ) -> None:
        self._folder, self._times, self._remedies = folder, times, remedies
        self._file = folder / NAME
        self._me = Holder.here()
        self._mine = (json.dumps(asdict(self._me), indent=2) + "\n").encode()
        self._counter = folder / f"lease-{self._me.token}{BEAT}"
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._held_at = float("-inf")
        self._loss = ""
        # State of a waiting process:
        self._silence = Silence(2 * times.look_s)
        self._settled_s, self._may_force = 0.0, True

    @property
    def token(self) -> str:
        """Unique id of this holder."""
        return self._me.token

    def attempt(self, *, force: bool = False) -> str:
        """Try to take the lease, which succeeds if the lease is free or its holder is dead.

        The caller repeats the call every ``look_s`` seconds. A pause of more than twice ``look_s``
        counts as twice ``look_s``, see ``Silence``.

        Args:
            force: take the lease also from a living holder, once.

        Returns:
            A description of the other holder; empty if this process holds the lease.

        Raises:
            ConfigError: the holder is alive after ``wait_s``.
            OSError: the directory cannot be written.
        """
        if self._create():
            return self._begin()
        passed_s = self._silence.passed()
        found = self._read()
        if found is None:
            return "the previous job releases its lease"
        if found == self._mine:
            self._settled_s += passed_s
            done = self._settled_s >= self._times.settle_s
            return self._begin() if done else "the lease is taken over"
        return self._judge(found, passed_s, force=force)

    def _judge(self, found: bytes, passed_s: float, *, force: bool) -> str:
        """Take the lease from a dead holder; describe a living holder, or raise an error."""
        holder = Holder.parse(found)
        who = "a job with an invalid lease file" if holder is None else holder.describe()
        beat = self._folder / f"lease-{holder.token if holder else ''}{BEAT}"
        silence = self._silence
        is_alive = silence.look((found, self._read(beat)), passed_s)
        is_gone = holder is not None and holder.is_gone(self._me)
        if (force and self._may_force) or is_gone or silence.quiet_s >= self._times.stale_s:
            self._may_force, self._settled_s = False, 0.0
            if self._read() == found:
                with publishing(self._file, f"lease-{self._me.token}") as part:
                    part.write_bytes(self._mine)
            return f"the lease of {who} is taken over"
        if is_alive and silence.waited_s >= self._times.wait_s:
            raise ConfigError(
                f"{self._folder} must be written by one job at a time, but {who} still writes to "
                f"it after {silence.waited_s:.0f} s; {self._remedies.held}"
            )
        return (
            f"{who} holds {self._folder}: waiting {self._times.wait_s:.0f} s for its end, or "
            f"{self._times.stale_s:.0f} s without a heartbeat"
        )

    def _create(self) -> bool:
        """Create the lease file exclusively; return False if it exists.

        If the file cannot be written completely, it is removed and ``OSError`` is raised.
        """
        try:
            file = self._file.open("xb")
        except FileExistsError:
            return False
        try:
            with file:
                file.write(self._mine)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            self._file.unlink(missing_ok=True)
            raise
        sync(self._folder)
        return True

    def _begin(self) -> str:
        self._count(0)
        for path in self._folder.glob(f"lease-*{BEAT}*"):  # files of former holders
            if path != self._counter:
                path.unlink(missing_ok=True)
        self._held_at = time.monotonic()
        self._thread = threading.Thread(target=self._keep, name="hpctrain-lease", daemon=True)
        self._thread.start()
        return ""

    @property
    def is_lost(self) -> bool:
        """True if this process has detected the loss of its lease; reads no file."""
        return bool(self._loss)

    def is_held(self, *, looks: bool = False) -> bool:
        """Return True if this process holds the lease. Must be called before each write.

        If the lease file is missing, the lease is lost, and this process does not restore the
        file: another job may have taken and released the lease while this process was stopped. If
        the file cannot be read for another reason, the method warns and returns True, because the
        file system may recover.

        Args:
            looks: read the lease file even if the last check was less than ``look_s`` seconds ago.
        """
        with self._lock:
            now = time.monotonic()
            if self._loss or self._thread is None:
                return False
            if not looks and now - self._held_at < self._times.look_s:
                return True
            try:
                found = self._read()
            except OSError as error:
                warn_once(f"the lease {self._file} cannot be read: {error}")
                return True
            if found != self._mine:
                self._loss = self._loss_text(found)
                return False
            self._held_at = now
            return True

    def check(self) -> None:
        """Read the lease file. Raises ``CheckpointError`` if this process has lost the lease."""
        if not self.is_held(looks=True):
            raise CheckpointError(self.loss())

    def loss(self) -> str:
        """Return the reason for the loss of the lease, as an error text."""
        return self._loss or self._loss_text(None)

    def _loss_text(self, found: bytes | None) -> str:
        if found is None:
            return (
                f"{self._folder} must be written by one job at a time, but the {NAME} of this "
                f"job is missing: another job wrote there while this job wrote no heartbeat, or "
                f"the file was removed; this job stops and writes no more; "
                f"{self._remedies.gone}"
            )
        holder = Holder.parse(found)
        return (
            f"{self._folder} must be written by one job at a time, but "
            f"{'another job' if holder is None else holder.describe()} has taken the lease "
            f"with --force or because this job wrote no heartbeat for "
            f"{self._times.stale_s:.0f} s; this job stops and writes no more; "
            f"{self._remedies.taken}"
        )

    def release(self) -> None:
        """Release the lease if this process holds the lease; else do nothing."""
        self._ended.set()
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()
        with suppress(OSError):
            if self._read() == self._mine:
                self._file.unlink()
            self._counter.unlink(missing_ok=True)

    def _keep(self) -> None:
        count = 0
        while not self._ended.wait(self._times.beat_s) and self.is_held(looks=True):
            count += 1
            try:
                self._count(count)
            except OSError as error:
                warn_once(
                    f"the heartbeat must be written into {self._folder}, but this failed: "
                    f"{error}; other jobs may take the lease"
                )

    def _count(self, count: int) -> None:
        part = self._counter.with_name(self._counter.name + PART)
        part.write_text(f"{count}\n")
        part.replace(self._counter)

    def _read(self, path: Path | None = None) -> bytes | None:
        try:
            return (path or self._file).read_bytes()
        except FileNotFoundError:
            return None
