"""Status of a run by its last record, and by who holds the lease on its directory."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from hpctrain.cluster.env import EXIT_CODE_FILE, STOPPED, STOPPING
from hpctrain.core.records import record_of
from hpctrain.launch.lease import Holder
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
"""Exit code of each state; 2 is that of a wrong command line."""

KILLED = 128  # exit codes above it are of signals


@dataclass(frozen=True, slots=True)
class Status:
    """How it stands with a run."""

    state: Literal["finished", "failed", "running", "killed", "missing", "stopped"]
    """``killed`` is ended without a word; ``running`` is known by who holds the lease."""
    what: str  # one human-readable line
    where: str = ""  # how far it has come, where it has not said how it ended

    @property
    def code(self) -> int:
        """For a script."""
        return CODES[self.state]

    def with_holder(self, path: Path, holder: Holder | None) -> "Status":
        """Return the status with the holder of the lease on the run's directory."""
        if holder is None:
            return self
        told = f"{holder.describe()} holds it"
        if holder.is_gone(Holder.here()):
            return replace(self, what=f"{self.what}; {told}, and that is dead")
        if self.state in ("killed", "missing"):
            return Status("running", f"{path} is at work{self.where}; {told}")
        return replace(self, what=f"{self.what}; {told}")


def status(path: Path) -> Status:
    """Judge the run in a directory by its last record.

    A launcher's exit code says less: it may be 0 after a node was lost, or 1 although all ranks
    have saved. The status includes the holder of the lease of the directory.
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
    """Judge the run of a program of the user's own by what its last job has left."""
    try:
        code = int((path / EXIT_CODE_FILE).read_text(encoding="ascii"))
    except OSError:
        return Status("missing", f"{path} holds no run that has begun to train")
    except ValueError:  # its job has begun, and its script was ended too
        return Status("killed", f"{path} was ended without a word")
    if code == 0:
        return Status("finished", f"{path} is finished: its program has ended with code 0")
    # srun kills ranks that end a moment after the first one.
    if code == STOPPED or (code > KILLED and (path / STOPPING).exists()):
        return Status("stopped", f"{path} was stopped, and goes on with its next job")
    return Status("failed", f"{path} failed: its program ended with code {code}")


def by_record(path: Path, record: Mapping[str, Any]) -> Status:
    """Judge the run in a directory by its last record."""
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
    told = f"{path} was ended without a word {where}"
    return Status("killed", told, where=f" {where}")


def _place(record: Mapping[str, Any]) -> str:
    return f"after step {record['step']}" if record.get("step") else "before its first step"


def last_record(path: Path) -> dict[str, Any]:
    """Return the last whole record of ``metrics.jsonl``; an empty one where there is none.

    Raises ``OSError``: the file cannot be read. ``ValueError``: it does not contain records.
    """
    lines = path.read_bytes().split(b"\n")[:-1]
    record = next(filter(None, map(record_of, reversed(lines))), None)
    if lines and record is None:
        raise ValueError(f"a record is an object with an event, got {lines[-1][:40]!r}")
    return record or {}
