"""Flight recorder: the last collectives of this process, and those that it waits in."""

import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakValueDictionary

from hpctrain.core.units import format_ranks

NUM_CALLS = 256
TEXT_CHARS = 200  # of a collective that ranks report to each other
LATE_S = 1.0  # a wait that has lasted less is none to ask about

_SHIFT_S = time.monotonic() - time.perf_counter()
"""Between the two clocks; measured once, so that a wait keeps its beginning."""
_NAME = re.compile(r"collective (\d+) of ([^:]+): ")


class Call(NamedTuple):
    """What a rank is about to do."""

    text: str
    number: int  # by which ranks compare it, from 0 to 2^62
    tag: int  # first one of its messages on a rail, which match no messages of other calls


class CallStream:
    """The collectives of one communicator, which its ranks count alike."""

    __slots__ = ("__weakref__", "_calls", "name", "number", "text", "waits_since_s")

    def __init__(self, name: str, calls: "deque[tuple[CallStream, int, str, float]]") -> None:
        self.name = name
        self.number = 0  # of the last one, from 1
        self.text = ""  # what that does
        self.waits_since_s: float | None = None
        """By ``time.perf_counter()``, while a thread waits for other ranks."""
        self._calls = calls

    def begin(self, text: str) -> None:
        """Note that this rank comes to its next collective."""
        self.text = text
        self.number = number = self.number + 1
        self._calls.append((self, number, text, time.perf_counter()))

    def recent(self) -> dict[int, tuple[str, float]]:
        """Return the texts of the last collectives, cut, and when each began, by number."""
        return {n: (text[:TEXT_CHARS], s) for of, n, text, s in list(self._calls) if of is self}

    def name_of(self, number: int, text: str) -> str:
        """Return what all ranks call a collective."""
        return f"collective {number} of {self.name}: {text}"


class FlightRecorder:
    """Knows the streams of a process; one thread of each writes, any other reads."""

    def __init__(self) -> None:
        self._calls = deque[tuple[CallStream, int, str, float]](maxlen=NUM_CALLS)
        self._streams = WeakValueDictionary[str, CallStream]()  # gone with their communicators
        self._num_made = Counter[str]()

    def new_stream(self, ranks: Sequence[int]) -> CallStream:
        """Make that of a communicator of these ranks of the world. Collective over them."""
        who = format_ranks(ranks)
        self._num_made[who] += 1
        number = self._num_made[who]
        name = who if number == 1 else f"{who} ({number})"
        self._streams[name] = made = CallStream(name, self._calls)
        return made

    def waiting(self) -> dict[str, float]:
        """Return the collectives in which this process waits, and since when: time.monotonic()."""
        now, found = time.perf_counter(), {}
        for each in list(self._streams.values()):
            since, number, text = each.waits_since_s, each.number, each.text
            if since is not None and number and now - since >= LATE_S:
                found[each.name_of(number, text)] = since + _SHIFT_S
        return found

    def lacks(self, name: str) -> bool:
        """Return True if this process takes part in a collective and has not come to it."""
        match = _NAME.match(name)
        stream = None if match is None else self._streams.get(match[2])
        return match is not None and stream is not None and stream.number < int(match[1])

    def calls(self) -> list[tuple[str, float]]:
        """Return the last collectives, the oldest first, and how many seconds ago each began."""
        now = time.perf_counter()
        return [(of.name_of(number, text), now - s) for of, number, text, s in list(self._calls)]

    def last(self) -> tuple[str, float | None]:
        """Return the last collective, and how many seconds ago it was begun; None without one."""
        return self.calls()[-1] if self._calls else ("none so far", None)

    def report(self) -> str:
        """Return a line for each collective, the oldest first."""
        return "".join(f"{ago_s:10.3f} s ago  {name}\n" for name, ago_s in self.calls())


def is_collective(name: str) -> bool:
    """Say whether this is the name of a recorded collective, and not of a named operation."""
    return _NAME.match(name) is not None
