"""The run that a job is to work on: its folder, the jobs that were submitted for it."""

import re
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core.errors import ConfigError, LaunchError

SCRIPT = "job.sbatch"
"""The script of the latest job of a run, in the run's folder."""

JOBS = "jobs.txt"
"""The numbers of its jobs, one a line."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """A job before it is submitted."""

    name: str
    folder: Path
    """Of the run; an array has one below it for each index."""
    is_array: bool = False

    def __post_init__(self) -> None:
        """Refuse a folder that a shell would read as something else."""
        if "$" in str(self.folder):
            raise ConfigError(
                f"the folder of a job's run is a plain name without $, got {self.folder}; "
                "say another with --name"
            )

    @property
    def directory(self) -> str:
        """The run's folder as the script says it."""
        return f"{self.folder}/$SLURM_ARRAY_TASK_ID" if self.is_array else str(self.folder)

    @property
    def output(self) -> str:
        """File of the output, in Slurm's patterns."""
        return f"{self.folder}/slurm-{'%A_%a' if self.is_array else '%j'}.out"

    def check_free(self, after: str) -> None:
        """Raise where another job works on this run, or it is finished.

        ``after`` is for what the job will wait, so that it does not work at the same time.

        Raises:
            ConfigError: the run is finished.
            LaunchError: a job of it waits or runs.
        """
        from hpctrain.launch.slurm.scheduler import still_there  # noqa: PLC0415
        from hpctrain.train.status import status  # noqa: PLC0415

        found = status(self.folder)
        if found.state == "finished":
            raise ConfigError(
                f"{found.what}; submit another run with --name {self.name}-2, or remove the folder"
            )
        path = self.folder / JOBS
        known = [int(word) for word in path.read_text().split()] if path.exists() else []
        others = [job for job in known if str(job) not in re.findall(r"\d+", after)]
        if others and (there := still_there(others)):
            raise LaunchError(
                f"one job at a time works on a run, and job {there[-1]} waits or runs for "
                f"{self.folder}; continue it with --after afterany:{there[-1]}, cancel it with "
                f"`scancel {there[-1]}`, or submit another run with --name {self.name}-2"
            )

    def submit(self, script: str) -> int:
        """Write the script and submit it; return the number of the job.

        Raises:
            ConfigError: the folder cannot be written.
            LaunchError: Slurm refuses.
        """
        from hpctrain.core.atomic import publishing  # noqa: PLC0415
        from hpctrain.launch.slurm.scheduler import submit  # noqa: PLC0415

        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with publishing(self.folder / SCRIPT) as part:
                part.write_text(script, encoding="utf-8")
            number = submit(self.folder / SCRIPT)
            with (self.folder / JOBS).open("a", encoding="utf-8") as file:
                file.write(f"{number}\n")
        except OSError as error:
            raise ConfigError(
                f"the folder {self.folder} cannot be written: {error}; choose another with --name"
            ) from None
        return number

    def how_to_watch(self, number: int, output: str) -> str:
        """Return the lines that tell a user where to look; ``output`` is in Slurm's patterns."""
        values = {"j": number, "A": number, "x": self.name, "a": "*", "%": "%"}
        file = re.sub(r"%\d*(.)", lambda found: str(values.get(found[1], "*")), output)
        run = self.folder / "INDEX" if self.is_array else self.folder
        rows = (
            (f"squeue -j {number}", "where it stands"),
            (f"tail -F {file}", "its output"),
            (f"hpctrain status {run}", "finished, stopped or still at work"),
            (f"touch {run}/STOP", "the run saves its state and stops"),
            (f"scancel {number}", "the job ends at once"),
        )
        width = max(len(command) for command, _ in rows)
        lines = [f"  {command:<{width}}  {what}" for command, what in rows]
        return "\n".join([f"job {number}: {self.folder / SCRIPT}", *lines])
