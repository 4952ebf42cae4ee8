"""Measurement of one repeat of a point of a study: starts the ranks and returns the record."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

from hpctrain.cluster.machine_load import LoadMeter
from hpctrain.core.atomic import PART, make_folder
from hpctrain.core.checks import seconds
from hpctrain.core.config import variable_of
from hpctrain.core.errors import DataError, HpctrainError
from hpctrain.launch.program import resolve, start
from hpctrain.studies.measurement import measure
from hpctrain.studies.point_records import PointRecord, StudyFolder
from hpctrain.studies.points import PointRepeat
from hpctrain.studies.study_file import StudyConfig

RECORDS = "records"  # subfolder of the folder of a repeat, to which the ranks write
OUTPUT = "output.txt"  # output of the processes of a repeat

SPACE = 65536  # bytes of a test file; if it cannot be written, a failure is not due to the point

_SHOWN = 15  # last lines of the output that an error contains
_VARIABLE = variable_of("records")
_GRACE_S, _LOOK_S = 5.0, 0.01


def carry_out(config: StudyConfig, attempt: PointRepeat, folder: StudyFolder) -> PointRecord:
    """Measure one repeat of a point. A failure is stored in the record, not raised.

    The function first removes files and processes of an interrupted measurement of this repeat.

    Raises ``OSError``: the folder cannot be written, which may be the cause of a failure.
    """
    place, study = clear(folder, attempt), config.study
    make_folder(place / RECORDS)
    begun, start, meter = datetime.now(timezone.utc), time.monotonic(), LoadMeter()
    try:
        _run(config, attempt, place)
        found = {"status": "done"} | measure(
            place / RECORDS, attempt.layout.ranks, warm_up=study.warm_up, target=study.target
        )
    except HpctrainError as error:
        _check_space(place)
        found = {"status": "failed", "error": f"{error}{_last_lines(place / OUTPUT)}"}
    if (seen := meter.read()) is not None:
        here = {"load": seen.load, "machine_cores": seen.cores, "celsius": seen.celsius}
        here |= {"num_throttled": seen.num_throttled}
        # Values in `found` take precedence: ranks sample only the counted steps, on all hosts.
        found = here | {"other_cores": seen.other_cores, "mhz": seen.mhz} | found
    return PointRecord(
        **asdict(attempt),
        oversubscribed=attempt.is_oversubscribed(study.cores, study.hosts),
        started=begun.strftime("%Y-%m-%dT%H:%M:%SZ"),
        folder=str(place.relative_to(folder.path)),
        wall_s=time.monotonic() - start,
        **found,
    )


def _check_space(place: Path) -> None:
    probe = place / f"space{PART}"
    try:
        probe.write_bytes(bytes(SPACE))
    finally:
        probe.unlink(missing_ok=True)


def clear(folder: StudyFolder, attempt: PointRepeat) -> Path:
    """Remove files and processes of an interrupted repeat; return the path of its folder."""
    place = folder.attempts / attempt.name
    if place.exists():
        _kill_remaining(place / RECORDS)
        shutil.rmtree(place)
    return place


def _run(config: StudyConfig, attempt: PointRepeat, place: Path) -> None:
    """Start the ranks and wait for their end. Raises ``DataError`` if the command fails."""
    launcher, command, variables = config.filled(attempt.names(config.study.mode, place))
    words = [*(resolve(launcher) if launcher else ()), *resolve(command)]
    records = str((place / RECORDS).absolute())
    environ = {**os.environ, **variables, _VARIABLE: records}
    code = _wait(words, environ, place / OUTPUT, seconds(config.study.timeout))
    if code is None:
        raise DataError(
            f"the command must end within study.timeout = {config.study.timeout}, but ran "
            "longer; raise this limit, or use smaller factors"
        )
    if code:
        raise DataError(f"the command ended with exit code {code}")


def _wait(
    words: Sequence[str], environ: Mapping[str, str], output: Path, timeout_s: float | None
) -> int | None:
    """Run a program and kill its remaining processes; return the exit code, None on timeout."""
    process = None
    with output.open("wb") as file:
        try:  # a signal may interrupt the start of the program
            process = start(words, env=environ, stdout=file, stderr=subprocess.STDOUT)
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            # `hpctrain launch` kills its ranks at the second signal.
            for patience_s in (1.0, 2.0):
                if process is not None and process.returncode is None:
                    process.terminate()
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        process.wait(patience_s)
            _kill_remaining(Path(environ[_VARIABLE]))
            if process is not None:
                process.wait()


def _remaining_processes(records: Path) -> list[int]:
    """Return the process ids of a repeat on this host, found by an environment variable."""
    mark = f"{_VARIABLE}={records.absolute()}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def _kill_remaining(records: Path) -> None:
    """Kill the processes of a repeat and wait until they have ended."""
    limit = time.monotonic() + _GRACE_S
    while (pids := _remaining_processes(records)) and time.monotonic() < limit:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_LOOK_S)


def _last_lines(output: Path) -> str:
    if not output.exists():
        return ""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines()[-_SHOWN:]
    return "".join(f"\n  {line}" for line in lines)
