"""Flight recorder: the last collectives of this process, and the collectives in progress."""

import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

from hpctrain.core.checksum import crc32
from hpctrain.core.errors import MismatchError
from hpctrain.core.units import format_numbers, format_ranks

NUM_CALLS = 256
TEXT_CHARS = 200  # longest description of a collective in reports to other ranks
LATE_S = 1.0  # shorter waits are not reported

_SHIFT_S = time.monotonic() - time.perf_counter()
"""Difference of the two clocks, measured once, so that the start of a wait is constant."""
_NAME = re.compile(r"collective (\d+) of ([^:]+): ")


class Call(NamedTuple):
    """Description of a collective, with a number that ranks compare."""

    text: str
    number: int  # compared between ranks, from 0 to 2^62
    tag: int  # first tag of its messages on a rail; other calls have other tags


class CallStream:
    """Numbers the collectives of one communicator, equally on all its ranks."""

    __slots__ = ("__weakref__", "_calls", "compared", "name", "number", "text", "waits_since_s")

    def __init__(self, name: str, calls: "deque[tuple[CallStream, int, str, float]]") -> None:
        self.name = name
        self.number = 0  # number of the last collective, from 1
        self.compared = 0  # number of the last collective that all ranks have compared
        self.text = ""  # description of the last collective
        self.waits_since_s: float | None = None
        """Start of the current wait for other ranks by ``time.perf_counter()``, or None."""
        self._calls = calls

    def begin(self, text: str) -> None:
        """Record that this rank starts its next collective."""
        self.text = text
        self.number = number = self.number + 1
        self._calls.append((self, number, text, time.perf_counter()))

    def recent(self) -> dict[int, tuple[str, float]]:
        """Return the shortened text and the start time of each recent collective, by number."""
        return {n: (text[:TEXT_CHARS], s) for of, n, text, s in list(self._calls) if of is self}

    def name_of(self, number: int, text: str) -> str:
        """Return the name of a collective, equal on all ranks."""
        return f"collective {number} of {self.name}: {text}"


class FlightRecorder:
    """Records the last collectives of all communicators of this process.

    Each communicator has a stream, which one thread writes and other threads read.
    """

    def __init__(self) -> None:
        self._calls = deque[tuple[CallStream, int, str, float]](maxlen=NUM_CALLS)
        self._streams = WeakValueDictionary[str, CallStream]()  # removed with their communicators
        self._num_made = Counter[str]()

    def new_stream(self, ranks: Sequence[int]) -> CallStream:
        """Return a stream for a communicator of world ``ranks``. Collective over these ranks."""
        who, exact = format_ranks(ranks), format_numbers(ranks)
        if not who.endswith(exact):  # several groups may have the same shortened name
            who += f", checksum {crc32(exact.encode()):08x}"
        self._num_made[who] += 1
        number = self._num_made[who]
        name = who if number == 1 else f"{who} ({number})"
        self._streams[name] = made = CallStream(name, self._calls)
        return made

    def waiting(self) -> dict[str, float]:
        """Return, by name, the start of each collective in which this process waits.

        Times are values of ``time.monotonic()``.
        """
        now, found = time.perf_counter(), {}
        for each in list(self._streams.values()):
            since, number, text = each.waits_since_s, each.number, each.text
            if since is not None and number and now - since >= LATE_S:
                found[each.name_of(number, text)] = since + _SHIFT_S
        return found

    def lacks(self, name: str) -> bool:
        """Return whether this rank takes part in collective ``name`` but has not started it."""
        match = _NAME.match(name)
        stream = None if match is None else self._streams.get(match[2])
        return match is not None and stream is not None and stream.number < int(match[1])

    def calls(self) -> list[tuple[str, float]]:
        """Return the last collectives, the oldest first, and their ages in seconds."""
        now = time.perf_counter()
        return [(of.name_of(number, text), now - s) for of, number, text, s in list(self._calls)]

    def last(self) -> tuple[str, float | None]:
        """Return the last collective and its age in seconds.

        The age is None if no collective was recorded.
        """
        return self.calls()[-1] if self._calls else ("none so far", None)

    def report(self) -> str:
        """Return a text with one line per recorded collective, the oldest first."""
        return "".join(f"{ago_s:10.3f} s ago  {name}\n" for name, ago_s in self.calls())


def is_collective(name: str) -> bool:
    """Return True for the name of a recorded collective, False for that of a named operation."""
    return _NAME.match(name) is not None


def different_calls(found: str) -> MismatchError:
    """Return the error for ranks that make different calls, described by ``found``."""
    return MismatchError(
        f"ranks must make the same calls in the same order, got {found}; let every rank take the "
        f"same path through the program, with tensors of the same shape and dtype"
    )
