"""Status of a run, from its last record and the lease of its directory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpctrain.cluster.env import EXIT_CODE_FILE, STOPPED, STOPPING
from hpctrain.core.records import record_of
from hpctrain.launch.lease import Holder
from hpctrain.launch.slurm.scheduler import JOBS
from hpctrain.train.metrics import result
from hpctrain.train.run_directory import RunDirectory

CODES = {
    "finished": 0,
    "failed": 1,
    "waiting": 3,
    "running": 4,
    "killed": 5,
    "missing": 6,
    "stopped": STOPPED,
}
"""Exit code of each state; 2 is the code of a wrong command line."""

KILLED = 128  # exit codes above this value mean that a signal ended the process


@dataclass(frozen=True, slots=True)
class Status:
    """State of a run."""

    state: Literal["finished", "failed", "running", "killed", "missing", "stopped"]
    """``killed``: the last job wrote no final record; ``running``: a live job holds the lease."""
    what: str  # one human-readable line
    where: str = ""  # position of a run without a last record, such as " after step 5"

    @property
    def code(self) -> int:
        """Exit code of ``hpctrain status``."""
        return CODES[self.state]

    def with_holder(self, path: Path, holder: Holder | None) -> "Status":
        """Return this status, updated with the job that holds the lease of the run directory."""
        if holder is None:
            return self
        text = f"{holder.describe()} holds it"
        if holder.is_gone(Holder.here()):
            return replace(self, what=f"{self.what}; {text}, but that job is dead")
        if self.state in ("killed", "missing"):
            return Status("running", f"{path} is running{self.where}; {text}")
        return replace(self, what=f"{self.what}; {text}")


def status(path: Path) -> Status:
    """Return the status of the run in a directory.

    The status is derived from the last record and the lease, because the exit code of a launcher
    is unreliable: it may be 0 after a node was lost, or 1 although all ranks have saved.

    Args:
        path: run directory.
    """
    return _by_records(path).with_holder(path, Holder.read(path))


def _by_records(path: Path) -> Status:
    directory = RunDirectory(path)
    try:
        record = last_record(directory.metrics)
    except FileNotFoundError:
        return _by_exit_code(path)
    except (OSError, ValueError) as error:
        return Status("killed", f"{directory.metrics} cannot be read: {error}")
    return by_record(path, record)


def _by_exit_code(path: Path) -> Status:
    """Return the status of a user's own program, from the files that its last job wrote."""
    try:
        code = int((path / EXIT_CODE_FILE).read_text(encoding="ascii"))
    except OSError:
        return Status("missing", not_started(path))
    except ValueError:  # empty file: the job started, but its script was killed
        return Status("killed", f"{path} ended without a last record")
    if code == 0:
        return Status("finished", f"{path} is finished: its program ended with code 0")
    # A signal may also mean that the run was stopped: srun kills the other ranks if one exits.
    if code == STOPPED or (code > KILLED and (path / STOPPING).exists()):
        return Status("stopped", f"{path} was stopped, and continues with its next job")
    return Status("failed", f"{path} failed: its program ended with code {code}")


def not_started(path: Path) -> str:
    """Return an error message, with a remedy, for a directory without records of a run."""
    logs = RunDirectory(path).logs
    text = "contains no run that has started to train" if path.is_dir() else "does not exist"
    if logs.is_dir() or (path / JOBS).exists():
        output = logs if logs.is_dir() else "its output"
        return f"{path} {text}; wait until its job has started, or read {output} if it has ended"
    return (
        f"{path} {text}; wait until its job has started, or pass the output_dir of a run, by "
        f"default runs/NAME"
    )


def by_record(path: Path, record: Mapping[str, Any]) -> Status:
    """Return the status of the run in ``path`` from its last record, without the lease."""
    event = record.get("event")
    if event == "finished":
        return Status("finished", f"{path} is finished: {result(record)}")
    if event == "stopped":
        return Status(
            "stopped",
            f"{path} was stopped by {record['reason']} after step {record['step']}; "
            f"the same command with --resume continues it",
        )
    if event == "failed":
        return Status("failed", f"{path} failed {_place(record)}: {record['reason']}")
    where = _place(record)
    text = f"{path} ended without a last record {where}"
    return Status("killed", text, where=f" {where}")


def _place(record: Mapping[str, Any]) -> str:
    return f"after step {record['step']}" if record.get("step") else "before its first step"


def last_record(path: Path) -> dict[str, Any]:
    """Return the last complete record of a file; an empty record if the file is empty.

    Args:
        path: file of records, ``metrics.jsonl``.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file does not contain records.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    record = next(filter(None, map(record_of, reversed(lines))), None)
    if lines and record is None:
        raise ValueError(f"a record must be an object with an event, got {lines[-1][:40]!r}")
    return record or {}
