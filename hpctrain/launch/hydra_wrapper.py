"""Wrapper between Hydra and a rank, so that one rank's failure ends the others.

Hydra, the launcher of MPICH and Intel MPI, ends a job when a process dies by a signal, or breaks
off after ``MPI_Init``. One that leaves earlier with an error, say a failed import, it takes for
done, and the other ranks wait in ``MPI_Init`` for ever.
"""

from collections.abc import Sequence

GRACE_S = 2
"""Time for all ranks to end with a code of their own, such as 85, before one ends the rest."""

# Signals are the rank's affair: a shell that died of one would take the rank along.
# Hydra gives every rank a process group, and is the parent of this shell.
_SCRIPT = f"""trap : HUP INT TERM USR1 USR2
"$@"; code=$?
trap - HUP INT TERM USR1 USR2
[ $code -le 128 ] || kill -$((code - 128)) $$
if [ $code -ne 0 ]; then
  (sleep {GRACE_S}; for rank in $(cat /proc/$PPID/task/$PPID/children); do kill -- -$rank; done) \\
    >/dev/null 2>&1 &
fi
exit $code"""


def guarded(argv: Sequence[str]) -> list[str]:
    """Wrap the command of a rank; its exit code stays what it is."""
    return ["sh", "-c", _SCRIPT, "rank", *argv]


def is_guard(command_line: bytes) -> bool:
    """Say whether a command line, as /proc has it, is that of a guard."""
    return command_line.startswith(b"\0".join((b"sh", b"-c", _SCRIPT.encode(), b"rank")))
