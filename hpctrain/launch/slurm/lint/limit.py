"""Check of a job's time limit against the time between two checkpoints of its run."""

import re
import tomllib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from hpctrain.core.errors import ConfigError
from hpctrain.core.finding import Finding
from hpctrain.core.units import format_seconds, parse_seconds
from hpctrain.launch.slurm.lint.script import BatchScript, base
from hpctrain.launch.slurm.lint.script_facts import LintFacts
from hpctrain.launch.slurm.lint.variables import UNKNOWN

DEFAULT_EVERY = "10min"
"""``checkpoint.every`` of a run that does not say it."""

_DAYS = re.compile(r"(\d+)-(\d+)(?::(\d+))?(?::(\d+))?")


def check_time(script: BatchScript, facts: LintFacts) -> Iterator[Finding]:
    """Find a job that is over before its run has saved its first checkpoint."""
    limit_s = time_limit_s(script.options.get("time", ""))
    if limit_s is None:
        return
    for line, words in script.commands:
        every, is_said = _every(words, facts.directory)
        if not isinstance(every, str) or every in ("", "none", "auto"):
            continue
        try:
            every_s = parse_seconds(every)
        except ConfigError:  # the run itself will say so
            continue
        if limit_s < every_s:
            yield Finding(
                "time limit",
                "warning" if is_said else "note",
                f"line {line}: the job ends after {format_seconds(limit_s)}, and its run saves a "
                f"checkpoint every {format_seconds(every_s)}: when it breaks off, all is lost",
                f"--set checkpoint.every={max(1, round(limit_s / 240))}min, or a longer --time",
            )


def time_limit_s(text: str) -> float | None:
    """Read a time limit as sbatch does; None for no limit and for what is no time.

    Minutes, minutes:seconds, hours:minutes:seconds, days-hours, days-hours:minutes and
    days-hours:minutes:seconds.
    """
    if match := _DAYS.fullmatch(text):
        days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
        return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)
    parts = text.split(":")
    if len(parts) > 3 or not all(part.isdigit() for part in parts):
        return None
    numbers = [int(part) for part in parts]
    if len(numbers) == 1:
        return 60.0 * numbers[0] or None
    hours = numbers[0] if len(numbers) == 3 else 0
    return float(hours * 3600 + numbers[-2] * 60 + numbers[-1])


def sbatch_time(text: str) -> str:
    """Return a time limit as sbatch takes it; ``90min`` and ``1h30min`` are read as well.

    Raises:
        ConfigError: it is neither of Slurm's forms nor a duration.
    """
    if time_limit_s(text) is not None or text.lower() in ("0", "unlimited", "infinite"):
        return text
    try:
        minutes, rest = divmod(parse_seconds(text), 60)
    except ConfigError:
        raise ConfigError(
            f'a time limit is Slurm\'s "01:30:00" or "1-12", or a duration such as "90min", '
            f"got {text!r}"
        ) from None
    hours, minutes = divmod(int(minutes) + (rest > 0), 60)  # Slurm counts in whole minutes
    return f"{hours:02d}:{minutes:02d}:00"


def _every(words: Sequence[str | None], directory: Path | None) -> tuple[Any, bool]:
    """Return ``checkpoint.every`` of the run that a command starts, and whether it is said."""
    config: str | None = None
    names = [base([word]) for word in words]
    starts = [at for at, pair in enumerate(pairwise(names), 2) if pair == ("hpctrain", "train")]
    rest = list(words[starts[0] :]) if starts and "--dry-run" not in words else []
    while rest:
        word = rest.pop(0) or UNKNOWN
        if word in ("--set", "--explain") and rest:
            word = f"{word}={rest.pop(0) or UNKNOWN}"
        if word.startswith("--set=checkpoint.every="):
            value = word.split("=", 2)[2].strip("\"'")
            return (None if UNKNOWN in value else value), True
        if config is None and not word.startswith("-"):
            config = word
    if config is None or UNKNOWN in config or directory is None:
        return None, False
    return _of_file(directory / Path(config).expanduser())


def _of_file(path: Path) -> tuple[Any, bool]:
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError):
        return None, False  # hpctrain train will say what is wrong
    checkpoint = table.get("checkpoint")
    if isinstance(checkpoint, dict) and "every" in checkpoint:
        return checkpoint["every"], True
    return DEFAULT_EVERY, False
