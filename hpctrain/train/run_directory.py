"""The folder that one run writes into."""

import json
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hpctrain.cluster.env import job_facts, job_id, loaded_modules, tuning
from hpctrain.cluster.resources import affinity, links
from hpctrain.core.atomic import make_folder, publishing, refusal
from hpctrain.core.errors import ConfigError
from hpctrain.core.provenance import processor, project, versions
from hpctrain.core.records import read
from hpctrain.core.units import format_numbers
from hpctrain.launch.lease import Holder
from hpctrain.launch.slurm.scheduler import restart_count
from hpctrain.train.metrics import RANKS, cut


class RunDirectory:
    """Where each file of a run lies; ``create`` makes the folders, on one rank only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"  # the configuration as it was used
        self.environment = path / "env.json"  # versions, machine, command line
        self.plan = path / "plan.json"  # topology and plan of the communication
        self.metrics = path / "metrics.jsonl"  # one JSON record per line
        self.ranks = path / RANKS  # the last times of each rank
        self.logs = path / "log"  # the folder of ``rank-N.log``
        self.checkpoints = path / "checkpoints"
        self.plots = path / "plots"  # the folder of figures
        self.plot = self.plots / "training.png"
        self.profile = path / "profile"  # the folder of traces of steps
        self.stop = path / "STOP"
        """A file that somebody makes who wants the run to save its state and stop."""

    def has_begun(self) -> bool:
        """Return True if a run was started here, whatever became of it."""
        return self.config.exists() or self.metrics.exists()

    def is_used(self) -> bool:
        """Return True if a run has a checkpoint or a test here: another one must not replace it.

        Steps alone do not count: the run begins again without them.
        """
        if next(self.checkpoints.glob("step-*"), None):
            return True
        records = read(self.metrics) if self.metrics.exists() else []
        return any(record["event"] in ("test", "finished") for record in records)

    def check_unused(self) -> None:
        """Raise a ``ConfigError`` if a run is here that must not be replaced, or is at work."""
        elsewhere = f"choose another folder with --set output_dir={self.path}-2"
        holder, is_used = Holder.read(self.path), self.is_used()
        if holder is not None and (holder.pid == os.getpid() or not self.has_begun()):
            holder = None
        if holder is not None and (is_used or not holder.is_gone(Holder.here())):
            raise ConfigError(
                f"{self.path} is in use: {holder.describe()} trains there, or was killed; "
                f"continue its run by --resume, which waits for it first, or {elsewhere}"
            )
        if is_used:
            raise ConfigError(
                f"{self.path} already contains the results of a run; continue it by --resume, "
                f"{elsewhere}, or remove it"
            )

    def make_log_folder(self) -> None:
        """Make the folder of the logs, which every rank needs before it joins the others.

        Raises ``ConfigError``: it cannot be made.
        """
        with self.explained():
            make_folder(self.logs)

    def create(self, config: str, environment: dict[str, Any], plan: dict[str, Any]) -> None:
        """Make the folders and write what is known before the first step; not collective.

        A run that was here without a checkpoint or a test is replaced. Raises ``ConfigError``:
        the folder is used, or cannot be written.
        """
        self.check_unused()
        self.make_log_folder()
        with self.explained():
            self.metrics.unlink(missing_ok=True)
            self.ranks.unlink(missing_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            self.plots.mkdir(exist_ok=True)
            _publish({self.environment: _json(environment), self.plan: _json(plan)})
            _publish({self.config: config})  # the last: with it the folder counts as used

    def go_on(self, config: str, plan: dict[str, Any], *, num_records: int, step: int) -> None:
        """Let another part of the run begin, behind ``num_records`` records; not collective.

        Later records come again. The part goes on after ``step``, 0 where it begins again. Raises
        ``ConfigError``: the folder cannot be written.
        """
        with self.explained():
            self.checkpoints.mkdir(exist_ok=True)
            self.plots.mkdir(exist_ok=True)
            cut(self.metrics, num_records, step)
            self.ranks.unlink(missing_ok=True)
            _publish({self.config: config, self.plan: _json(plan)})
            self.stop.unlink(missing_ok=True)

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Let a refusal of the file system be an error that says what to do."""
        try:
            yield
        except OSError as error:
            raise ConfigError(
                f"the run directory {self.path} cannot be written: "
                f"{refusal(error, 'choose another with --set output_dir=…')}"
            ) from None


def _publish(texts: Mapping[Path, str]) -> None:
    """Write files, each at once and on disk."""
    for path, text in texts.items():
        with publishing(path) as part:
            part.write_text(text, encoding="utf-8")


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def environment(mpi: str | None = None) -> dict[str, Any]:
    """What somebody needs to know to repeat the run: versions, code, machine, job, command.

    ``mpi`` is the version of the MPI library, where one is used.
    """
    return {
        **versions(),
        "mpi": mpi,
        "mpi_settings": tuning(),
        "project": project(Path.cwd()),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": processor(),
        "cpus": os.cpu_count(),
        "cores": format_numbers(affinity()),
        "links": links(),
        "modules": loaded_modules(),
        "job": {"id": job_id(), "restarts": restart_count(), **job_facts()} if job_id() else {},
        "command": sys.argv,
        "working_directory": str(Path.cwd()),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
