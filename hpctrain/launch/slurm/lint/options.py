"""Options of ``sbatch`` and ``srun``, split from the program behind them.

Source: ``sbatch --help`` and ``srun --help`` of Slurm 22.05, and the manual of 24.11.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SHORT = {
    "c": "cpus-per-task",
    "e": "error",
    "G": "gpus",
    "J": "job-name",
    "K": "kill-on-bad-exit",
    "k": "no-kill",
    "m": "distribution",
    "N": "nodes",
    "n": "ntasks",
    "o": "output",
    "t": "time",
    "W": "wait",
}
"""One-letter options that a check asks for, by their long names; others keep their letter."""

ALIASES = {"tasks-per-node": "ntasks-per-node", "tasks": "ntasks"}
"""Other spellings that Slurm takes."""

FLAGS = frozenset(
    (
        *("contiguous", "disable-status", "exact", "external", "help", "hold"),
        *("ignore-pbs", "label", "multi-prog", "no-allocate", "no-requeue", "overcommit"),
        *("overlap", "oversubscribe", "parsable", "preserve-env", "pty", "quiet"),
        *("quit-on-interrupt", "reboot", "requeue", "resv-ports", "spread-job", "stepmgr"),
        *("test-only", "unbuffered", "usage", "use-min-nodes", "verbose", "version"),
        *"EHhlOQsuVvXZ",
    )
)
"""Options that never take a value."""

OPTIONAL = frozenset(
    (
        *("bcast", "compress", "exclusive", "get-user-env", "immediate", "kill-on-bad-exit"),
        *("nice", "no-kill", "propagate", "send-libs", "I"),
    )
)
"""Options whose value, if any, is joined to them: ``--nice=5``, ``-K0``."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """Options and what stands behind them."""

    options: Mapping[str, str | None] = field(default_factory=dict)
    """By long name; empty for a flag; None for a value that is not known."""
    rest: tuple[str | None, ...] = ()
    """The program and its arguments."""
    is_complete: bool = True
    """False where a word is not known, so that more options may hide there."""


def parse(words: Sequence[str | None], *, is_sbatch: bool = False) -> Parsed:
    """Split the words behind ``srun`` or ``#SBATCH`` into options and the rest.

    Args:
        words: None stands for words that are not known.
        is_sbatch: ``--wait`` is a flag of sbatch, and takes a value of srun.
    """
    flags = FLAGS | {"wait"} if is_sbatch else FLAGS
    options: dict[str, str | None] = {}
    is_complete = True
    at = 0
    while at < len(words):
        word = words[at]
        if word is None:
            is_complete = False
        elif word == "--":
            at += 1
            break
        elif not word.startswith("-") or word == "-":
            break
        else:
            name, value = _split(word, flags, options)
            if value is None and name not in flags | OPTIONAL:
                at += 1
                options[name] = words[at] if at < len(words) else ""
            else:
                options[name] = value or ""
        at += 1
    return Parsed(options, tuple(words[at:]), is_complete)


def _split(
    word: str, flags: frozenset[str], options: dict[str, str | None]
) -> tuple[str, str | None]:
    """Return the last option of a word and its value, None for no value; keep flags before it."""
    if word.startswith("--"):
        name, equals, text = word[2:].partition("=")
        return ALIASES.get(name, name), text if equals else None
    letters = word[1:]
    while (name := SHORT.get(letters[0], letters[0])) in flags and len(letters) > 1:
        options[name] = ""
        letters = letters[1:]
    return name, letters[1:].removeprefix("=") or None
