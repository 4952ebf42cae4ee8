"""Options of ``sbatch`` and ``srun``: which there are, and which take a value.

Source: ``sbatch --help`` and ``srun --help`` of Slurm 22.05, and the manual of 24.11.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

SHORT = {
    "A": "account",
    "a": "array",
    "B": "extra-node-info",
    "b": "begin",
    "C": "constraint",
    "c": "cpus-per-task",
    "D": "chdir",
    "d": "dependency",
    "E": "preserve-env",
    "e": "error",
    "F": "nodefile",
    "G": "gpus",
    "H": "hold",
    "h": "help",
    "I": "immediate",
    "i": "input",
    "J": "job-name",
    "K": "kill-on-bad-exit",
    "k": "no-kill",
    "L": "licenses",
    "l": "label",
    "M": "clusters",
    "m": "distribution",
    "N": "nodes",
    "n": "ntasks",
    "O": "overcommit",
    "o": "output",
    "p": "partition",
    "Q": "quiet",
    "q": "qos",
    "r": "relative",
    "S": "core-spec",
    "s": "oversubscribe",
    "T": "threads",
    "t": "time",
    "u": "unbuffered",
    "V": "version",
    "v": "verbose",
    "W": "wait",
    "w": "nodelist",
    "X": "disable-status",
    "x": "exclude",
    "Z": "no-allocate",
}
"""One-letter options by their long names."""

ALIASES = {"tasks-per-node": "ntasks-per-node", "tasks": "ntasks", "cpu_bind": "cpu-bind"}
"""Other spellings that Slurm takes."""

FLAGS = frozenset(
    (
        *("contiguous", "disable-status", "exact", "external", "help", "hold"),
        *("ignore-pbs", "label", "multi-prog", "no-allocate", "no-requeue", "overcommit"),
        *("overlap", "oversubscribe", "parsable", "preserve-env", "pty", "quiet"),
        *("quit-on-interrupt", "reboot", "requeue", "resv-ports", "spread-job", "stepmgr"),
        *("test-only", "unbuffered", "usage", "use-min-nodes", "verbose", "version"),
    )
)
"""Options that never take a value."""

OPTIONAL = frozenset(
    (
        *("bcast", "compress", "exclusive", "get-user-env", "immediate", "kill-on-bad-exit"),
        *("nice", "no-kill", "propagate", "send-libs"),
    )
)
"""Options whose value, if any, is joined to them: ``--nice=5``, ``-K0``."""

_SBATCH_WAIT = "wait"


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
    options: dict[str, str | None] = {}
    is_complete = True
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word is None:
            is_complete = False
            continue
        if word == "--":
            break
        if not word.startswith("-") or word == "-":
            at -= 1
            break
        for name, value, wants_next in _split(word, is_sbatch=is_sbatch):
            options[name] = value
            if wants_next:
                options[name] = words[at] if at < len(words) else ""
                at += 1
    return Parsed(options, tuple(words[at:]), is_complete)


def takes_value(name: str, *, is_sbatch: bool = False) -> bool:
    """Say whether the word behind this option belongs to it."""
    return name not in FLAGS and name not in OPTIONAL and not (is_sbatch and name == _SBATCH_WAIT)


def _split(word: str, *, is_sbatch: bool) -> list[tuple[str, str, bool]]:
    """Return the options of one word: name, value, whether the value is the next word."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        name = ALIASES.get(name, name)
        return [(name, value, not equals and takes_value(name, is_sbatch=is_sbatch))]
    found: list[tuple[str, str, bool]] = []
    letters = word[1:]
    while letters:
        name, letters = SHORT.get(letters[0], letters[0]), letters[1:]
        if name in FLAGS or (is_sbatch and name == _SBATCH_WAIT):
            found.append((name, "", False))
            continue
        found.append((name, letters.removeprefix("="), takes_value(name) and not letters))
        break
    return found
