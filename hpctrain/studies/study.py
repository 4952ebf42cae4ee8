"""A study in its folder: begun, gone on with after any kill, complete."""

import fcntl
import json
import platform
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from hpctrain.cluster.env import job_id, tuning
from hpctrain.cluster.resources import affinity, num_granted
from hpctrain.core.atomic import make_folder
from hpctrain.core.errors import ConfigError
from hpctrain.core.keys import render
from hpctrain.core.logs import logger
from hpctrain.core.provenance import processor, versions
from hpctrain.core.records import Records
from hpctrain.core.units import format_numbers
from hpctrain.launch.program import ask
from hpctrain.studies.attempt import RECORDS, carry_out, clear
from hpctrain.studies.points import Attempt, attempts_of
from hpctrain.studies.records import Environment, PointRecord, StudyFolder, ranks_of
from hpctrain.studies.study_file import StudyConfig

_GIT_S = 10.0


class Study:
    """What is asked, where its files lie, and what is left to do."""

    def __init__(self, config: StudyConfig, path: Path) -> None:
        """Look at the points; nothing is written. Raises ``ConfigError``: there is none."""
        self.config, self.folder = config, StudyFolder(path)
        self.facts = config.facts(num_granted())
        self.attempts = attempts_of(config)

    def missing(self, *, repeat: int | None = None, failed: bool = False) -> list[Attempt]:
        """Return the attempts that have no record yet, in order.

        ``repeat`` takes those of one repeat alone, ``failed`` those that have failed too.
        """
        known = {
            record.order
            for record in self.folder.read_points()
            if not (failed and record.status == "failed")
        }
        return [
            attempt
            for attempt in self.attempts
            if attempt.order not in known and repeat in (None, attempt.repeat)
        ]

    def expected_s(self, attempts: Iterable[Attempt]) -> float | None:
        """Return what attempts will take, by others of as many ranks, or else by all others.

        None where nothing was measured yet.
        """
        walls: dict[int, list[float]] = {}
        for record in self.folder.read_points():
            if record.wall_s is not None:
                walls.setdefault(ranks_of(record.point), []).append(record.wall_s)
        every = [wall for found in walls.values() for wall in found]
        if not every:
            return None
        return sum(fmean(walls.get(attempt.layout.ranks, every)) for attempt in attempts)

    def prepare(self) -> None:
        """Write what is asked, or check that it is the same.

        Raises ``ConfigError``: the folder holds another study, or cannot be written.
        """
        folder = self.folder
        with _explained(folder.path):
            make_folder(folder.attempts)
            if folder.study.exists():
                self._check_same()
            folder.write(folder.file, render(self.config))
            folder.write(folder.study, self.facts)

    def measure(
        self,
        attempts: Iterable[Attempt],
        *,
        share: int | None = None,
        begun: Callable[[Attempt], object] = lambda _: None,
        ended: Callable[[PointRecord], object] = lambda _: None,
    ) -> None:
        """Carry attempts out, one after the other; a record is on disk before the next begins.

        ``share`` has a file of its own, so that several jobs may measure a study. ``begun`` and
        ``ended`` hear of each attempt. Raises ``ConfigError``: another process measures it, or
        the folder cannot be written.
        """
        with _explained(self.folder.path), self._held(share) as records:
            # Another process may have measured some since they were found missing.
            done = {each.order for each in self.folder.read_points() if each.status == "done"}
            left = [attempt for attempt in attempts if attempt.order not in done]
            self._keep_environment()
            for attempt in left:
                clear(self.folder, attempt)
            for attempt in left:
                begun(attempt)
                record = carry_out(self.config, attempt, self.folder, cores=self.facts.cores)
                records.append(record.as_dict())
                records.sync()
                self._keep_plan(attempt)
                ended(record)

    def _check_same(self) -> None:
        now = self.facts
        before = replace(self.folder.read_study(), repeats=now.repeats, cores=now.cores)
        changed = [
            name for name, value in before.as_dict().items() if now.as_dict()[name] != value
        ]
        if changed:
            raise ConfigError(
                f"{self.folder.path} holds a study of other {', '.join(changed)}; only repeats "
                f"may change: measure into another folder by --out"
            )

    def _keep_environment(self) -> None:
        """Write where the study runs; a warning tells what is not as it was before."""
        now = _environment()
        if not self.folder.environment.exists():
            self.folder.write(self.folder.environment, now)
            return
        before = self.folder.read_environment()
        for name in ("versions", "cpu", "cores", "commit"):
            if getattr(before, name) != getattr(now, name):
                logger.warning(
                    f"{self.folder.path} was begun with {name} {getattr(before, name)} and goes "
                    f"on with {getattr(now, name)}: its points may not be comparable; measure "
                    f"into another folder by --out, unless that makes no difference"
                )

    @contextmanager
    def _held(self, share: int | None) -> Iterator[Records]:
        """Open the file of the records: of all alone, or of a share beside other shares."""
        with ExitStack() as stack:
            whole = stack.enter_context(Records(self.folder.points_file()))
            records = whole
            if share is not None:
                records = stack.enter_context(Records(self.folder.points_file(share)))
            self._lock(whole, fcntl.LOCK_EX if share is None else fcntl.LOCK_SH)
            if share is not None:
                self._lock(records, fcntl.LOCK_EX)
            yield records

    def _lock(self, records: Records, kind: int) -> None:
        try:
            fcntl.flock(records.fileno(), kind | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"one process at a time measures a study, or a repeat of it, and another one is "
                f"at work in {self.folder.path}; this command goes on when it has ended"
            ) from None
        except OSError:
            pass  # a file system without locks

    def _keep_plan(self, attempt: Attempt) -> None:
        """Keep topology and plan of a point, where its ranks have told them."""
        path = self.folder.attempts / attempt.name / RECORDS / "plan.json"
        with suppress(OSError, ValueError):
            found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            topology, before = found.pop("topology", None), self.folder.read_environment()
            after = replace(
                before,
                topology={**(before.topology or {}), attempt.text: topology},
                plan={**(before.plan or {}), attempt.text: found},
            )
            if attempt.text not in (before.plan or {}):
                self.folder.write(self.folder.environment, after)


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"the folder of a study can be written, {path} cannot: {error}; choose another by "
            f"--out, or make room: what was measured stays"
        ) from None


def _environment() -> Environment:
    return Environment(
        versions=versions(),
        cpu=processor(),
        cores=num_granted(),
        host=platform.node(),
        commit=_commit(),
        topology=None,
        plan=None,
        slurm_job=job_id() or None,
        pinning={"cores": format_numbers(affinity()), "mpi": tuning()},
    )


def _commit() -> str | None:
    """Return the commit of the working directory, with ``+`` where files differ from it."""
    git = shutil.which("git")
    if git is None:
        return None
    try:
        head = ask([git, "rev-parse", "HEAD"], timeout_s=_GIT_S)
        changes = ask([git, "status", "--porcelain", "-uno"], timeout_s=_GIT_S)
    except OSError:
        return None
    mark = "+" if changes.stdout.strip() else ""
    return head.stdout.strip() + mark if head.returncode == 0 else None
