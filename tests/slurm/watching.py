"""Runs in Slurm jobs: submission, progress, and the comparison of two runs."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpctrain.core.records import read
from tests.cluster.slurm import Job, SlurmCluster
from tests.slurm import training

ROOT = Path(__file__).parents[2]


class Run:
    """A tiny run in its own folder, executed by jobs."""

    def __init__(
        self,
        slurm: SlurmCluster,
        folder: Path,
        *,
        step_s: float = 0.05,
        shape: Sequence[str] = ("--time=10", "--ntasks-per-node=2"),
        site: Path | None = None,
    ) -> None:
        folder.mkdir()
        self.config, self.directory = training.write(folder), folder / "run"
        self._slurm, self._folder, self._step_s = slurm, folder, step_s
        self._shape = shape
        self._site = {"MPI_TYPE": "pmix"}
        if site is not None:
            self._site = {"HPCTRAIN_SITE": str(site), "SBATCH_PARTITION": "low"}

    def submit(
        self, template: str, *options: str, more: Sequence[str] = (), **variables: str
    ) -> Job:
        """Submit an unchanged template.

        Args:
            template: name of the template.
            options: options of sbatch.
            more: arguments of hpctrain train.
            variables: environment variables of the job.
        """
        environ = {
            "CONFIG": str(self.config),
            "RUN_DIRECTORY": str(self.directory),
            # probing could give another plan, with another order of summation
            "HPCTRAIN_PROBE": "off",
            **self._site,
            **variables,
        }
        script = ROOT / "slurm" / f"{template}.sbatch"
        step = ("--set", f"model.args.step_s={self._step_s}")
        before = (*self._shape, *options)
        return self._slurm.sbatch(*before, script, *step, *more, environ=environ, cwd=self._folder)

    def records(self, *events: str) -> list[dict[str, Any]]:
        """Return the records of the run, optionally only of some events."""
        path = self.directory / "metrics.jsonl"
        found = read(path) if path.exists() else []
        return [r for r in found if not events or r["event"] in events]

    def parts(self) -> list[dict[str, Any]]:
        return self.records("started", "resumed")

    def wait_for_step(self, step: int, *, part: int = 1, timeout_s: float = 240) -> None:
        """Wait until a part of the run has reached a step."""
        deadline = time.monotonic() + timeout_s
        while True:
            records = self.records()
            begun = [i for i, r in enumerate(records) if r.get("part") == part]
            steps = [r["step"] for r in records[begun[0] :] if "step" in r] if begun else []
            if steps and max(steps) >= step:
                return
            assert time.monotonic() < deadline, f"no step {step} in part {part}: {records[-3:]}"
            time.sleep(0.05)

    def curve(self) -> list[tuple[Any, ...]]:
        """Return loss, metric and state hash of each step and test, for an exact comparison."""
        names = ("event", "epoch", "step", "loss", "metric", "state_hash")
        return [
            tuple(record.get(name) for name in names)
            for record in self.records("step", "test", "finished")
        ]
