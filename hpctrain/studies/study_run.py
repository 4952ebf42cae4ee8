"""A study in its folder: begun, gone on with after any kill, complete."""

import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean

from hpctrain.cluster.env import job_id, tuning
from hpctrain.cluster.resources import affinity, num_granted
from hpctrain.core.atomic import make_folder, refusal
from hpctrain.core.errors import ConfigError
from hpctrain.core.keys import render
from hpctrain.core.logs import logger
from hpctrain.core.provenance import processor, project, versions
from hpctrain.core.records import Records
from hpctrain.core.units import format_numbers
from hpctrain.launch.lease import Lease, Times, WaysOut
from hpctrain.studies.attempt import RECORDS, carry_out, clear
from hpctrain.studies.point_records import Environment, PointRecord, StudyFolder
from hpctrain.studies.points import PointRepeat, attempts_of
from hpctrain.studies.study_file import StudyConfig, load

TIMES = Times(wait_s=6.0)  # nobody waits for a whole repeat

_WAY_OUT = "this command goes on with what is left when that has ended, or elsewhere by --out"


class Study:
    """What is asked, where its files lie, and what is left to do."""

    def __init__(self, config: StudyConfig, path: Path, times: Times = TIMES) -> None:
        """Look at the points; nothing is written. Raises ``ConfigError``: there is none."""
        cores = config.study.cores or num_granted()
        self.config = replace(config, study=replace(config.study, cores=cores))
        self.folder, self._times = StudyFolder(path), times
        self.attempts = attempts_of(config)

    def missing(self, *, repeat: int | None = None, failed: bool = False) -> list[PointRepeat]:
        """Return the attempts that have no record yet, in order.

        ``repeat`` takes those of one repeat alone, ``failed`` those that have failed too.
        """
        records = self.folder.read_points()
        known = {each.order for each in records if not (failed and each.status == "failed")}
        return [
            attempt
            for attempt in self.attempts
            if attempt.order not in known and repeat in (None, attempt.repeat)
        ]

    def expected_s(self, attempts: Iterable[PointRepeat]) -> float | None:
        """Return what attempts will take, by others that succeeded, of as many ranks if any did.

        None where nothing was measured yet.
        """
        walls: dict[int, list[float]] = {}
        for record in self.folder.read_points():
            if record.is_done and record.wall_s is not None:
                walls.setdefault(record.layout.ranks, []).append(record.wall_s)
        every = [wall for found in walls.values() for wall in found]
        if not every:
            return None
        return sum(fmean(walls.get(attempt.layout.ranks, every)) for attempt in attempts)

    def prepare(self) -> None:
        """Write what is asked, or check that it is the same."""
        folder = self.folder
        with self._explained():
            make_folder(folder.attempts)
            changed = self.config.changes(load(folder.file)) if folder.file.exists() else []
            if changed:
                raise ConfigError(
                    f"{folder.path} holds a study of other {', '.join(changed)}; only repeats "
                    f"and limits may change: measure into another folder by --out"
                )
            folder.write(folder.file, render(self.config))

    def measure(
        self,
        attempts: Iterable[PointRepeat],
        *,
        begun: Callable[[PointRepeat], object] = lambda _: None,
        ended: Callable[[PointRecord], object] = lambda _: None,
    ) -> None:
        """Carry attempts out, one after the other; a record is on disk before the next begins.

        Each repeat has a lease and a file of its own, so that several jobs may measure a study.
        ``begun`` and ``ended`` hear of each attempt. Raises ``ConfigError``: another process
        measures the same repeat, or the folder cannot be written.
        """
        for repeat, found in groupby(attempts, lambda each: each.repeat):
            of_repeat = list(found)
            path = self.folder.points_file(repeat)
            with self._explained(), self._held(repeat) as lease, Records(path) as records:
                # Another process may have measured some since they were found missing.
                done = {each.order for each in self.folder.read_points() if each.status == "done"}
                left = [attempt for attempt in of_repeat if attempt.order not in done]
                self._keep_environment()
                for attempt in left:
                    clear(self.folder, attempt)
                for attempt in left:
                    begun(attempt)
                    record = carry_out(self.config, attempt, self.folder)
                    lease.check()
                    records.append(asdict(record))
                    records.sync()
                    self._keep_plan(attempt)
                    ended(record)

    @contextmanager
    def _held(self, repeat: int) -> Iterator[Lease]:
        """Hold the lease of a repeat in the block; wait for one that a dead process has left."""
        place = self.folder.path / "leases" / str(repeat)
        make_folder(place)
        lease, told = Lease(place, self._times, ways_out=WaysOut(*3 * [_WAY_OUT])), False
        try:
            while waits_for := lease.attempt():
                if not told:
                    logger.warning(waits_for)
                told = True
                time.sleep(self._times.look_s)
            yield lease
        finally:
            lease.release()

    def _keep_environment(self) -> None:
        """Write where the study runs; a warning tells what is not as it was before."""
        now, before = _environment(), self.folder.read_environment()
        if before is None:
            self.folder.write(self.folder.environment, now)
            return
        for name in ("versions", "cpu", "cores", "commit"):
            if before.get(name) != now[name]:
                logger.warning(
                    f"{self.folder.path} was begun with {name} {before.get(name)} and goes on "
                    f"with {now[name]}: its points may not be comparable; measure into another "
                    f"folder by --out, unless that makes no difference"
                )

    def _keep_plan(self, attempt: PointRepeat) -> None:
        """Keep topology and plan of a point, where its ranks have told them."""
        folder, before = self.folder, self.folder.read_environment()
        path = folder.attempts / attempt.name / RECORDS / "plan.json"
        with suppress(FileNotFoundError, ValueError):
            plan = json.loads(path.read_text(encoding="utf-8"))
            mpi = plan.pop("mpi", None) or (before or {}).get("mpi")
            told = {"topology": plan.pop("topology", None), "plan": plan}
            if before and attempt.text not in before["plan"]:
                kept = {n: {**before[n], attempt.text: value} for n, value in told.items()}
                folder.write(folder.environment, {**before, **kept, "mpi": mpi})

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"the folder {self.folder.path} of the study cannot be written: "
                f"{refusal(error, 'name another one by --out')}; what was measured stays"
            ) from None


def _environment() -> Environment:
    state = project(Path.cwd())
    return {
        "versions": versions(),
        "cpu": processor(),
        "cores": num_granted(),
        "host": platform.node(),
        "commit": f"{state['commit']}{'+' * ('changed' in state)}" if state else None,
        "topology": {},
        "plan": {},
        "slurm_job": job_id() or None,
        "pinning": {"cores": format_numbers(affinity()), "mpi": tuning()},
    }
