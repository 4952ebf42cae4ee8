"""Measurement of a study, which can be resumed after any interruption."""

import json
import platform
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, replace
from itertools import groupby
from pathlib import Path
from statistics import fmean

from hpctrain.cluster.env import job_id, tuning
from hpctrain.cluster.resources import affinity, num_granted
from hpctrain.core.atomic import explained_writes, make_folder
from hpctrain.core.errors import ConfigError
from hpctrain.core.formats import stamp
from hpctrain.core.keys import render
from hpctrain.core.logs import logger
from hpctrain.core.provenance import processor, project, versions
from hpctrain.core.records import Records
from hpctrain.core.units import format_numbers
from hpctrain.launch.lease import Lease, LeaseRemedies, Times
from hpctrain.studies.attempt import RECORDS, carry_out, clear
from hpctrain.studies.point_records import (
    READER,
    VERSION,
    Environment,
    PointRecord,
    StudyFolder,
)
from hpctrain.studies.points import PointRepeat, attempts_of
from hpctrain.studies.repeated_failures import RepeatedFailures
from hpctrain.studies.study_archive import checksums
from hpctrain.studies.study_file import StudyConfig, load

TIMES = Times(wait_s=6.0)  # a wait for a lease is shorter than a repeat

_REMEDY = "run this command again after the end of that job, or choose another folder with --out"


class Study:
    """Measurement of a study; the results are stored in a folder.

    The constructor writes no file.

    Raises:
        ConfigError: the study has no point.
    """

    def __init__(self, config: StudyConfig, path: Path, times: Times = TIMES) -> None:
        cores = config.study.cores or num_granted()
        self.config = replace(config, study=replace(config.study, cores=cores))
        self.folder, self._times = StudyFolder(path), times
        self.attempts = attempts_of(config)

    def missing(self, *, repeat: int | None = None, failed: bool = False) -> list[PointRepeat]:
        """Return the repeats of points that have no record yet, in the order of measurement.

        ``repeat`` is the index, from 0, of the only repeat to return; None returns all. With
        ``failed``, the result includes failed repeats.
        """
        records = self.folder.read_points()
        known = {each.order for each in records if not (failed and each.status == "failed")}
        return [
            attempt
            for attempt in self.attempts
            if attempt.order not in known and repeat in (None, attempt.repeat)
        ]

    def expected_s(self, attempts: Iterable[PointRepeat]) -> float | None:
        """Return the expected seconds of ``attempts``, or None if no attempt has succeeded yet.

        Each attempt is expected to take the mean time of the successful attempts with the same
        number of ranks; if there are none, the mean time of all successful attempts.
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
        """Write the configuration, or check that the folder contains an equal configuration."""
        folder = self.folder
        with self._explained():
            make_folder(folder.attempts)
            changed = self.config.changes(load(folder.file)) if folder.file.exists() else []
            if changed:
                raise ConfigError(
                    f"a study can only change its repeats and limits, but {folder.path} contains "
                    f"a study with other values of {', '.join(changed)}; choose another folder "
                    f"with --out"
                )
            folder.write(folder.file, render(self.config))

    def measure(
        self,
        attempts: Iterable[PointRepeat],
        *,
        begun: Callable[[PointRepeat], object] = lambda _: None,
        ended: Callable[[PointRecord], object] = lambda _: None,
    ) -> bool:
        """Measure attempts one after the other; write each record before the next attempt begins.

        Each repeat has its own lease and file, so that several jobs may measure a study
        concurrently.

        Args:
            attempts: repeats of points to measure.
            begun: called at the start of each attempt.
            ended: called with the record of each attempt.

        Returns:
            False if the measurement stopped early, because all further attempts would fail; see
            ``RepeatedFailures``.

        Raises:
            ConfigError: another process measures the same repeat, or the folder cannot be written.
        """
        failures = None
        for repeat, found in groupby(attempts, lambda each: each.repeat):
            of_repeat = list(found)
            path = self.folder.points_file(repeat)
            with self._explained(), self._held(repeat) as lease, Records(path) as records:
                # Another process may have measured some of the missing attempts.
                known = self.folder.read_points()
                done = {each.order for each in known if each.status == "done"}
                left = [attempt for attempt in of_repeat if attempt.order not in done]
                failures = failures or RepeatedFailures(known)
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
                    if failures.stops(record):
                        return False
        return True

    @contextmanager
    def _held(self, repeat: int) -> Iterator[Lease]:
        """Hold the lease of a repeat inside the block; wait while another process may hold it."""
        place = self.folder.path / "leases" / str(repeat)
        make_folder(place)
        lease, is_first = Lease(place, self._times, remedies=LeaseRemedies(*3 * [_REMEDY])), True
        try:
            while waits_for := lease.attempt():
                if is_first:
                    logger.warning(waits_for)
                is_first = False
                time.sleep(self._times.look_s)
            yield lease
        finally:
            lease.release()

    def _keep_environment(self) -> None:
        """Write the environment, or log a warning for each difference from the recorded one."""
        now, before = _environment(self.config), self.folder.read_environment()
        if before is None:
            self.folder.write(self.folder.environment, now)
            return
        for name in ("versions", "cpu", "cores", "commit", "files"):
            if before.get(name) != now[name]:
                logger.warning(
                    f"a study must have one environment, but {name} was {before.get(name)} at "
                    f"the start and is {now[name]} now: its points may not be comparable; choose "
                    "another folder with --out, unless the change makes no difference"
                )

    def _keep_plan(self, attempt: PointRepeat) -> None:
        """Store the topology and plan of a point, if the ranks wrote these data to a file."""
        folder, before = self.folder, self.folder.read_environment()
        path = folder.attempts / attempt.name / RECORDS / "plan.json"
        with suppress(FileNotFoundError, ValueError):
            plan = json.loads(path.read_text(encoding="utf-8"))
            mpi = plan.pop("mpi", None) or (before or {}).get("mpi")
            found = {"topology": plan.pop("topology", None), "plan": plan}
            if before and attempt.text not in before["plan"]:
                kept = {n: {**before[n], attempt.text: value} for n, value in found.items()}
                folder.write(folder.environment, {**before, **kept, "mpi": mpi})

    def _explained(self) -> AbstractContextManager[None]:
        elsewhere = "choose another folder with --out; existing records stay"
        return explained_writes("the folder of a study", self.folder.path, elsewhere)


def _environment(config: StudyConfig) -> Environment:
    state = project(Path.cwd())
    return {
        **stamp(VERSION, READER),
        "versions": versions(),
        "cpu": processor(),
        "cores": num_granted(),
        "host": platform.node(),
        "commit": f"{state['commit']}{'+' * ('changed' in state)}" if state else None,
        "files": checksums(config),
        "topology": {},
        "plan": {},
        "slurm_job": job_id() or None,
        "pinning": {"cores": format_numbers(affinity()), "mpi": tuning()},
    }
