"""What mpirun and its ranks write to stderr: each thing once."""

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

_RULE = re.compile(rb"\s*[-=]{60,}\s*")  # above and below what a launcher says
_NOISE = re.compile(
    rb"MPI_ABORT was invoked|prterun has exited due to process|BAD TERMINATION|"
    rb"one or more processes exited with non-zero|application called MPI_Abort|"
    rb"mpirun has exited due to process|mpiexec has exited due to process"
)
"""What launchers say of a rank that has ended all others."""
_SILENT = re.compile(rb"exiting\s+improperly")  # of one that could say nothing
_TOLD = re.compile(
    rb"\[rank \d+\] |Traceback \(most|"
    rb"^hpctrain: (?!all ranks have )(?!.* \[(all \d+ ranks|ranks? \d[^]]*)\]$)",
    re.MULTILINE,
)
"""By ranks, of their end: a traceback, or an error of all. Merged warnings end with the ranks."""
_RECENT_S = 1.0  # other words of a rank that are older are not about its end

_CODE = re.compile(rb"%s(\d+)" % ENDING.encode())

LOST = "a node is lost"  # is heard where a launcher says so
_LOSSES = re.compile(rb"lost communication with a remote daemon|daemon failed to report back")
"""What Open MPI 5 says of a node that is gone; its mpirun may then end with 0, or not at all."""
KILLED = "a signal has ended a rank"  # its number, where the launcher is Hydra
_SIGNAL = re.compile(rb"EXIT STRING: .*\(signal (\d+)\)|KILLED BY SIGNAL: (\d+)")
_LONGEST = 30  # lines of a launcher's box; what is longer is something else

_TRACEBACK = b"Traceback (most recent call last):"
_BEGIN = re.compile(
    rb"Traceback \(most recent|[Uu]sage: |[\w./-]*python[\d.]*: |(rank|sh): \d+: |sh: line \d+: "
)
"""How errors begin that all ranks may meet before they know each other: of a script, of its
arguments, of the interpreter and of the shell."""
_WITHOUT_HOROVOD = (
    b"hpctrain: Horovod is not installed; `hpctrain shim SCRIPT` in place of `python SCRIPT` runs "
    b"the script unchanged, `hpctrain shim -m MODULE` a module\n"
)
_QUIET_S = 0.3  # silence after which all ranks have written an error that they have met
_MOST_LINES = 10_000  # of errors that are held back meanwhile


def say(text: str) -> None:
    """Write a line to stderr; none where it is closed, as that of a terminal after SIGHUP."""
    _write(sys.stderr, f"hpctrain: {text}\n".encode())


def fold(process: subprocess.Popen[bytes], heard: Counter[str]) -> None:
    """Copy mpirun's stderr to ours, without its boxes about a rank that has told its error itself.

    Where no rank has said a word about its end, they are the only news, and stay; not where all
    have stopped as they were asked. A traceback of several ranks, as of a script that fails before
    they know each other, comes once. ``heard`` counts the lines ``BEGUN``, ``ENDED``, ``FAILED``
    and ``LOST``; ``heard[ENDING]`` is the exit code that a rank has reported, ``heard[KILLED]``
    the signal that has ended one.
    """
    box: list[bytes] = []
    held = b""  # what may come before the words of a rank
    has_told, spoke_at, sink = False, -math.inf, sys.stderr
    for part in _once(_lines(process.stderr)) if process.stderr is not None else ():
        is_rule = _RULE.fullmatch(part) is not None
        if box or is_rule:
            box.append(part)
            if not (is_rule and len(box) > 1) and len(box) < _LONGEST:
                continue
        text, box = b"".join(box) or part, []
        if found := _SIGNAL.search(text):
            heard[KILLED] = int(found[1] or found[2])
        if _NOISE.search(text):
            held += text
            continue
        heard.update({said: text.count(said.encode()) for said in (BEGUN, ENDED, FAILED)})
        heard[LOST] += _LOSSES.search(text) is not None
        if ENDING not in heard and (code := _CODE.search(text)):
            heard[ENDING] = int(code[1])
        if text.strip() and not is_rule:
            has_told, spoke_at = has_told or bool(_TOLD.search(text)), time.monotonic()
        _write(sink, text)
    has_spoken = time.monotonic() - spoke_at < _RECENT_S and not _SILENT.search(held)
    is_known = has_told or has_spoken or process.wait() == STOPPED
    _write(sink, b"".join(box) + (b"" if is_known else held))
    if process.stderr is not None:
        process.stderr.close()


def _once(lines: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines as they come; those of errors together, at the next silence.

    An error that is written again later, as by a rank that has started late, is mentioned only.
    """
    error: list[bytes] = []
    told = set[bytes]()
    for line in lines:
        is_other = not line or _RULE.fullmatch(line) or _NOISE.search(line)
        if error and (is_other or len(error) > _MOST_LINES):
            yield _new(error, told)
            error = []
        if (error or _BEGIN.match(line)) and not is_other:
            error.append(line)
        elif line:
            yield line
    if error:
        yield _new(error, told)


def _new(error: Sequence[bytes], told: set[bytes]) -> bytes:
    text, num_ranks = merged(error)
    is_new = text not in told
    told.add(text)
    if is_new and b"No module named 'horovod" in text:
        text += _WITHOUT_HOROVOD
    if is_new and num_ranks == 1:
        return text
    ranks = "1 rank has" if num_ranks == 1 else f"{num_ranks} ranks have"
    note = f"hpctrain: {ranks} told this{'' if is_new else ' again'}\n"
    return (text if is_new else b"") + note.encode()


def merged(lines: Iterable[bytes]) -> tuple[bytes, int]:
    """Return the lines of one error that several ranks have written, in any order, and how many.

    Lines that differ, such as the last one, are all kept; a rank may have been killed before it
    had written all.
    """
    told: list[bytes] = []
    at: list[int] = []  # how many of them each rank has written
    for line in lines:
        behind = (rank for rank, n in enumerate(at) if n < len(told) and told[n] == line)
        rank = next(behind, None)
        if rank is not None:
            at[rank] += 1
            continue
        # A cause is written first: then an empty line stands above the error that it has led to.
        if not told or (line == told[0] and told[-1].strip()):
            at.append(1)
            if told:
                continue
        else:
            at[at.index(len(told))] += 1
        told.append(line)
    return b"".join(told), len(at)


def _lines(source: IO[bytes]) -> Iterator[bytes]:
    """Yield lines, and at once what may be the begin of a line that is still written.

    An empty one after some silence.
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
        if raw is None:  # such as that of a notebook
            sink.write(text.decode(errors="replace"))
        else:
            raw.write(text)
        sink.flush()
    except (OSError, ValueError) as error:
        if getattr(error, "errno", None) not in (errno.EIO, errno.EPIPE):
            return
        # The terminal is gone: what is left in the buffer would make Python exit with code 120.
        with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), sink.fileno())
