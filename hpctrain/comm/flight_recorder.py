"""Flight recorder: the last collectives of this process, and those that it waits in."""

import re
import time
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from hpctrain.core.units import format_ranks

NUM_CALLS = 256
LATE_S = 1.0  # a wait that has lasted less is none to ask about

_NAME = re.compile(r"collective (\d+) of ([^:]+): ")


class RecordedCall(NamedTuple):
    """A collective that this process has come to."""

    of: str  # its communicator
    number: int  # among those of the communicator, from 1
    text: str
    begun_s: float  # by time.perf_counter()

    @property
    def name(self) -> str:
        """What all ranks call it."""
        return f"collective {self.number} of {self.of}: {self.text}"


class CallStream:
    """The collectives of one communicator, which its ranks count alike."""

    __slots__ = ("_recorder", "last", "name", "waits_since_s")

    def __init__(self, recorder: "FlightRecorder", name: str) -> None:
        self.name = name
        self.last = RecordedCall(name, 0, "none", 0.0)
        self.waits_since_s: float | None = None
        """By ``time.perf_counter()``, while a thread waits for other ranks."""
        self._recorder = recorder

    def begin(self, text: str) -> None:
        """Note that this rank comes to its next collective."""
        self.last = call = RecordedCall(self.name, self.last.number + 1, text, time.perf_counter())
        self._recorder.calls.append(call)


class FlightRecorder:
    """Knows the streams of a process; one thread of each writes, any other reads."""

    def __init__(self) -> None:
        self.calls = deque[RecordedCall](maxlen=NUM_CALLS)
        self._streams: dict[str, CallStream] = {}
        self._num_made = Counter[str]()

    def new_stream(self, ranks: Sequence[int]) -> CallStream:
        """Make that of a communicator of these ranks of the world. Collective over them."""
        who = format_ranks(ranks)
        self._num_made[who] += 1
        number = self._num_made[who]
        name = who if number == 1 else f"{who} ({number})"
        self._streams[name] = made = CallStream(self, name)
        return made

    def waiting(self) -> dict[str, float]:
        """Return the collectives in which this process waits, and since when: time.monotonic()."""
        now, offset = time.perf_counter(), time.monotonic() - time.perf_counter()
        found = {}
        for stream in list(self._streams.values()):
            since, last = stream.waits_since_s, stream.last
            if since is not None and last.number and now - since >= LATE_S:
                found[last.name] = since + offset
        return found

    def lacks(self, name: str) -> bool:
        """Say whether this process takes part in a collective and has not come to it."""
        match = _NAME.match(name)
        stream = None if match is None else self._streams.get(match[2])
        return stream is not None and match is not None and stream.last.number < int(match[1])

    def last(self) -> tuple[str, float | None]:
        """Return the last collective, and how many seconds ago it was begun; None without one."""
        if not self.calls:
            return "none so far", None
        call = self.calls[-1]
        return call.name, time.perf_counter() - call.begun_s

    def report(self) -> str:
        """Return a line for each collective, the oldest first."""
        now = time.perf_counter()
        return "".join(f"{now - c.begun_s:10.3f} s ago  {c.name}\n" for c in list(self.calls))


def is_collective(name: str) -> bool:
    """Say whether this is the name of a recorded collective, and not of a named operation."""
    return _NAME.match(name) is not None
