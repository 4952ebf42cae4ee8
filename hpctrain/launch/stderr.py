"""Filter for stderr of mpirun and its ranks, which merges repeated messages."""

import contextlib
import errno
import math
import os
import re
import select
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, TextIO

from hpctrain.cluster.env import BEGUN, ENDED, ENDING, STOPPED
from hpctrain.cluster.start_watch import FAILED

_RULE = re.compile(rb"\s*[-=]{60,}\s*")  # line above and below a message of a launcher
_NOISE = re.compile(
    rb"MPI_ABORT was invoked|prterun has exited due to process|BAD TERMINATION|"
    rb"one or more processes exited with non-zero|application called MPI_Abort|"
    rb"mpirun has exited due to process|mpiexec has exited due to process"
)
"""Messages of launchers about a rank that ended all other ranks."""
_SILENT = re.compile(rb"exiting\s+improperly")
"""Matches messages about a rank that ended without an error text."""
_ERRORS = re.compile(
    rb"\[rank \d+\] |Traceback \(most|"
    rb"^hpctrain: (?!all ranks have )(?!.* \[(all \d+ ranks|ranks? \d[^]]*)\]$)",
    re.MULTILINE,
)
"""Errors of ranks: a traceback, or a line of hpctrain.

Merged warnings, which end with the numbers of ranks, do not match.
"""
_RECENT_S = 1.0  # output of a rank that is older than this does not explain the rank's end

_CODE = re.compile(rb"%s(\d+)" % ENDING.encode())

GONE = "a rank has exited early"  # key of the number of launcher messages about such ranks
LOST = "a node is lost"  # key of the number of lost nodes that a launcher reported
_LOSSES = re.compile(rb"lost communication with a remote daemon|daemon failed to report back")
"""Messages of Open MPI 5 about a lost node; after the loss, mpirun may return 0 or hang."""
KILLED = "a signal has ended a rank"  # key of the signal number that Hydra reports
_SIGNAL = re.compile(rb"EXIT STRING: .*\(signal (\d+)\)|KILLED BY SIGNAL: (\d+)")
_LONGEST = 30  # maximum number of lines in one launcher message

_TRACEBACK = b"Traceback (most recent call last):"
_BEGIN = re.compile(
    rb"Traceback \(most recent|[Uu]sage: |[\w./-]*python[\d.]*: |(rank|sh): \d+: |sh: line \d+: "
)
"""First lines of errors that all ranks may print before ``MPI_Init``.

The errors are of a script, its arguments, the interpreter or the shell.
"""
_WITHOUT_HOROVOD = (
    b"hpctrain: Horovod must be installed for this script, but is not; run the unchanged script "
    b"with `hpctrain shim SCRIPT` instead of `python SCRIPT`, or `hpctrain shim -m MODULE`\n"
)
_QUIET_S = 0.3  # time without output after which the error of all ranks is complete
_MOST_LINES = 10_000  # limit of the buffered lines of an error


def write_line(text: str) -> None:
    """Write a line to stderr; ignore a closed stderr, such as a terminal after SIGHUP."""
    _write(sys.stderr, f"hpctrain: {text}\n".encode())


def fold(process: subprocess.Popen[bytes], counts: Counter[str]) -> None:
    """Copy stderr of mpirun to stderr of this process, without redundant messages.

    Messages of the launcher about a failed rank are dropped if a rank printed the reason, or if
    all ranks stopped on request. A traceback that several ranks write, for example because a
    script fails before ``MPI_Init``, is written once.

    Args:
        process: mpirun, with a pipe as stderr; this call waits for its end.
        counts: this call stores here the counts of the lines ``BEGUN``, ``ENDED`` and ``FAILED``,
            the count of messages about a lost node (``LOST``) or a rank that exited without an
            error (``GONE``), the exit code that a rank reported (``ENDING``), and the number of
            the signal that ended a rank (``KILLED``).
    """
    box: list[bytes] = []
    held = b""  # launcher messages, which may precede the error of a rank
    has_error, has_reason, spoke_at, sink = False, False, -math.inf, sys.stderr
    for part in _once(_lines(process.stderr)) if process.stderr is not None else ():
        is_rule = _RULE.fullmatch(part) is not None
        if box or is_rule:
            box.append(part)
            if not (is_rule and len(box) > 1) and len(box) < _LONGEST:
                continue
        text, box = b"".join(box) or part, []
        if found := _SIGNAL.search(text):
            counts[KILLED] = int(found[1] or found[2])
        if _NOISE.search(text):
            held += text
            continue
        counts.update({line: text.count(line.encode()) for line in (BEGUN, ENDED, FAILED)})
        counts[LOST] += _LOSSES.search(text) is not None
        if ENDING not in counts and (code := _CODE.search(text)):
            counts[ENDING] = int(code[1])
        if text.strip() and not is_rule:
            is_error, spoke_at = bool(_ERRORS.search(text)), time.monotonic()
            has_error |= is_error
            # A rank that detects the end of another rank does not know the reason.
            has_reason |= is_error and b"; all ranks end" not in text
        _write(sink, text)
    is_silent = _SILENT.search(held) is not None
    counts[GONE] += is_silent and not has_reason
    has_spoken = time.monotonic() - spoke_at < _RECENT_S and not is_silent
    is_known = has_error or has_spoken or process.wait() == STOPPED
    _write(sink, b"".join(box) + (b"" if is_known else held))
    if process.stderr is not None:
        process.stderr.close()


def _once(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield each line when it arrives; yield an error of several ranks once, when it is complete.

    If a rank that started late writes the same error again, only a note is yielded.
    """
    error: list[bytes] = []
    reported = set[bytes]()
    for line in lines:
        is_other = not line or _RULE.fullmatch(line) or _NOISE.search(line)
        if error and (is_other or len(error) > _MOST_LINES):
            yield _new(error, reported)
            error = []
        if (error or _BEGIN.match(line)) and not is_other:
            error.append(line)
        elif line:
            yield line
    if error:
        yield _new(error, reported)


def _new(error: Sequence[bytes], reported: set[bytes]) -> bytes:
    text, num_ranks = merged(error)
    is_new = text not in reported
    reported.add(text)
    if is_new and b"No module named 'horovod" in text:
        text += _WITHOUT_HOROVOD
    if is_new and num_ranks == 1:
        return text
    ranks = "1 rank has" if num_ranks == 1 else f"{num_ranks} ranks have"
    note = f"hpctrain: {ranks} reported this{'' if is_new else ' again'}\n"
    return (text if is_new else b"") + note.encode()


def merged(lines: Iterable[bytes]) -> tuple[bytes, int]:
    """Merge the lines of one error that several ranks wrote interleaved.

    All different lines are kept. The output of a rank that was killed may be incomplete.

    Returns:
        The text of the error, and the number of ranks that wrote the error.
    """
    different: list[bytes] = []
    at: list[int] = []  # number of lines that each rank wrote
    for line in lines:
        behind = (rank for rank, n in enumerate(at) if n < len(different) and different[n] == line)
        rank = next(behind, None)
        if rank is not None:
            at[rank] += 1
            continue
        # In a chain of exceptions, an empty line precedes the second traceback.
        if not different or (line == different[0] and different[-1].strip()):
            at.append(1)
            if different:
                continue
        else:
            at[at.index(len(different))] += 1
        different.append(line)
    return b"".join(different), len(at)


def _lines(source: IO[bytes]) -> Iterator[bytes]:
    """Yield the lines of ``source``, and an empty line after ``_QUIET_S`` without output.

    An incomplete line is yielded without delay, unless a launcher message or a traceback may
    begin with it.
    """
    rest, is_quiet = b"", True
    while True:
        if not is_quiet and not select.select([source], [], [], _QUIET_S)[0]:
            is_quiet = True
            yield b""
            continue
        chunk, is_quiet = os.read(source.fileno(), 65536), False
        if not chunk:
            break
        *lines, rest = (rest + chunk).splitlines(keepends=True) or [b""]
        yield from lines
        if rest.endswith(b"\n") or not rest.lstrip().startswith((b"-", b"=", _TRACEBACK[:1])):
            yield rest
            rest = b""
    yield rest


def _write(sink: TextIO, text: bytes) -> None:
    text = text.replace(b"\0", b"")
    try:
        sink.flush()
        raw = getattr(sink, "buffer", None)
        if raw is None:  # for example in a notebook
            sink.write(text.decode(errors="replace"))
        else:
            raw.write(text)
        sink.flush()
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) not in (errno.EIO, errno.EPIPE):
            return
        # The terminal was closed: unwritten output would make Python exit with code 120.
        with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sink.fileno())
