"""Which part of a run this is, and why the one before it has ended."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpctrain.cluster.env import job_id
from hpctrain.launch.slurm.scheduler import restart_count

KILLED = "killed"
"""How a part has ended that left no word: a crash, a lost node, a limit that came too early."""

FAILED = "an error of all ranks"
"""How a part has ended that all ranks have broken off together, such as a loss that is NaN."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """What the first record of a part says about it."""

    part: int = 1
    """Counted from 1, over all jobs of the run; also those that came to no checkpoint."""
    ended_by: str | None = None
    """Why the part before has ended: who stopped it, or ``killed``; None for the first."""
    job: str = ""
    """What the scheduler calls the job; empty outside of one."""
    restarts: int = 0
    """How often Slurm has started this job again."""

    @classmethod
    def after(cls, records: Sequence[dict[str, Any]]) -> "Part":
        """Return the part that follows on all records of a run, in this process's job."""
        job, restarts = job_id(), restart_count()
        parts = [r.get("part", 1) for r in records if r["event"] in ("started", "resumed")]
        if not parts:
            return cls(job=job, restarts=restarts)
        last = records[-1]
        known = {"stopped": last.get("reason", KILLED), "failed": FAILED}
        ended_by = known.get(last["event"], KILLED)
        return cls(part=parts[-1] + 1, ended_by=ended_by, job=job, restarts=restarts)

    def describe(self) -> str:
        """Say it in one line, for people."""
        job = f" in job {self.job}" if self.job else ""
        again = f", restart {self.restarts}" if self.restarts else ""
        ended = (
            "was ended without a word"
            if self.ended_by == KILLED
            else f"was stopped by {self.ended_by}"
        )
        return f"part {self.part} of the run{job}{again}: the part before {ended}"
