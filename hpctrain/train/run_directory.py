"""Run directory: names of its files, checks before its use, and creation of the files."""

import json
import os
import platform
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hpctrain.cluster.env import job_facts, job_id, loaded_modules, tuning
from hpctrain.cluster.resources import affinity, links
from hpctrain.core.atomic import explained_writes, make_folder, publishing
from hpctrain.core.errors import ConfigError
from hpctrain.core.formats import fault_of, stamp
from hpctrain.core.paths import absolute
from hpctrain.core.provenance import processor, project, versions
from hpctrain.core.records import read
from hpctrain.core.units import format_numbers
from hpctrain.launch.lease import Holder
from hpctrain.launch.slurm.scheduler import restart_count
from hpctrain.train.metrics import RANKS, cut

VERSION, READER = 1, "1.0"
"""Version of the format of a run directory, and the oldest hpctrain that reads this version."""


class RunDirectory:
    """Paths of the files of a run; only rank 0 calls ``create`` and ``resume``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"  # configuration of the last start or resume
        self.environment = path / "env.json"  # versions, machine, command line
        self.plan = path / "plan.json"  # topology and communication plan
        self.metrics = path / "metrics.jsonl"  # one JSON record per line
        self.ranks = path / RANKS  # latest times of each rank
        self.logs = path / "log"  # contains ``HOST.log``
        self.checkpoints = path / "checkpoints"
        self.plots = path / "plots"  # contains figures
        self.plot = self.plots / "training.png"
        self.profile = path / "profile"  # contains traces of steps
        self.stop = path / "STOP"
        """File that a user creates to request that the run saves its state and stops."""

    def has_begun(self) -> bool:
        """Return True if a run was started in this directory."""
        return self.config.exists() or self.metrics.exists()

    def check_format(self) -> None:
        """Check that this hpctrain can read the files of the run.

        Raises:
            ConfigError: a newer hpctrain wrote the files, in a newer format.
        """
        try:
            record = json.loads(self.environment.read_bytes())
        except (OSError, ValueError):  # missing or damaged: readers of the file raise an error
            return
        if isinstance(record, dict) and (fault := fault_of(record, VERSION)):
            raise ConfigError(f"the run {self.path} cannot be read: {fault}")

    def is_used(self) -> bool:
        """Return True if the directory has a checkpoint or a test record.

        A new run must not replace a checkpoint or a test record. It may replace a directory with
        only step records, because a run without a checkpoint starts again from step 0.
        """
        if next(self.checkpoints.glob("step-*"), None):
            return True
        records = read(self.metrics) if self.metrics.exists() else []
        return any(record["event"] in ("test", "finished") for record in records)

    def check_unused(self) -> None:
        """Check that a new run may use this directory.

        Raises:
            ConfigError: the directory has results of a run, or another job uses it.
        """
        elsewhere = f"choose another folder with --set output_dir={self.path}-2"
        holder, is_used = Holder.read(self.path), self.is_used()
        if holder is not None and (holder.pid == os.getpid() or not self.has_begun()):
            holder = None
        if holder is not None and (is_used or not holder.is_gone(Holder.here())):
            raise ConfigError(
                f"a run directory must be used by one job at a time, but {self.path} is in use: "
                f"{holder.describe()} trains there, or was killed; continue its run with "
                f"--resume, which waits for that job, or {elsewhere}"
            )
        if is_used:
            raise ConfigError(
                f"{self.path} already contains the results of a run; continue it with --resume, "
                f"{elsewhere}, or remove it"
            )

    def make_log_folder(self) -> None:
        """Create the folder of the logs; every rank calls this before it joins the world. Local.

        Raises:
            ConfigError: the folder cannot be created.
        """
        with self.explained():
            make_folder(self.logs)

    def create(self, config: str, environment: dict[str, Any], plan: dict[str, Any]) -> None:
        """Create the folders and files of a new run. Local.

        Replaces the files of an earlier run that has neither a checkpoint nor a test record.

        Args:
            config: configuration in TOML.
            environment: content of ``env.json``.
            plan: content of ``plan.json``.

        Raises:
            ConfigError: the directory is in use, or cannot be written.
        """
        self.check_unused()
        self.make_log_folder()
        with self.explained():
            self.metrics.unlink(missing_ok=True)
            self.ranks.unlink(missing_ok=True)
            self.checkpoints.mkdir(exist_ok=True)
            self.plots.mkdir(exist_ok=True)
            stamped = _json({**stamp(VERSION, READER), **environment})
            _publish({self.environment: stamped, self.plan: _json(plan)})
            _publish({self.config: config})  # last, because has_begun() checks this file

    def resume(self, config: str, plan: dict[str, Any], *, num_records: int, step: int) -> None:
        """Prepare the directory of a run that continues from a checkpoint. Local.

        Args:
            config: configuration in TOML.
            plan: content of ``plan.json``.
            num_records: number of records to keep; the run writes the later records again.
            step: step after which the run continues.

        Raises:
            ConfigError: the directory cannot be written.
        """
        with self.explained():
            self.checkpoints.mkdir(exist_ok=True)
            self.plots.mkdir(exist_ok=True)
            cut(self.metrics, num_records, step)
            self.ranks.unlink(missing_ok=True)
            _publish({self.config: config, self.plan: _json(plan)})
            self.stop.unlink(missing_ok=True)

    def explained(self) -> AbstractContextManager[None]:
        """Convert ``OSError`` inside the block into ``ConfigError`` with a remedy."""
        elsewhere = "choose another with --set output_dir=…"
        return explained_writes("the run directory", self.path, elsewhere)


def _publish(texts: Mapping[Path, str]) -> None:
    """Write each file atomically, with fsync."""
    for path, text in texts.items():
        with publishing(path) as part:
            part.write_text(text, encoding="utf-8")


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"


def environment(mpi: str | None = None) -> dict[str, Any]:
    """Return versions, state of the code, machine, job and command of this process.

    Args:
        mpi: version of the MPI library, if used.
    """
    return {
        **versions(),
        "mpi": mpi,
        "mpi_settings": tuning(),
        "project": project(absolute("")),
        "platform": platform.platform(),
        "host": platform.node(),
        "cpu": processor(),
        "cpus": os.cpu_count(),
        "cores": format_numbers(affinity()),
        "links": links(),
        "modules": loaded_modules(),
        "job": {"id": job_id(), "restarts": restart_count(), **job_facts()} if job_id() else {},
        "command": sys.argv,
        "working_directory": str(absolute("")),
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
