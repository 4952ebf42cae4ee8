"""A ring buffer in shared memory: one process writes messages, another process reads them.

Only the writer stores the counter of written bytes, and only the reader stores the counter of read
bytes. The ring is a byte stream in which the length of each message precedes the message, so a
message may be larger than the ring.
"""

from collections import deque

from hpctrain.comm.node.segments import LINE_BYTES, Fence, Semaphore

RING_BYTES = 1 << 14  # size of the ring for one direction between two ranks
HEAD_BYTES = 2 * LINE_BYTES
"""Counters before the ring: one cache line for the writer and one for the reader."""
_WRITTEN, _STUCK, _READ = 0, 1, LINE_BYTES // 8
_LENGTH_BYTES = 8


class Outlet:
    """The writing end of a ring.

    Args:
        memory: ``HEAD_BYTES + RING_BYTES`` zeros, aligned to 8 bytes.
        doorbell: doorbell of the reader.
        fence: orders loads and stores; None if not needed.
    """

    __slots__ = ("_counters", "_data", "_doorbell", "_fence", "_rest", "_written", "is_stuck")

    def __init__(self, memory: memoryview, doorbell: Semaphore, fence: Fence) -> None:
        self.is_stuck = False  # whether messages wait for space
        self._counters = memory[:HEAD_BYTES].cast("Q")
        self._data = memory[HEAD_BYTES : HEAD_BYTES + RING_BYTES]
        self._doorbell = doorbell.post
        self._fence = fence
        self._written = 0
        self._rest: deque[memoryview] = deque()

    def send(self, message: bytes) -> None:
        """Write the part of ``message`` that fits the ring; ``push`` writes the rest."""
        framed = len(message).to_bytes(_LENGTH_BYTES, "little") + message
        # One byte stays free, so that a stuck writer can still write a byte: see push().
        if self.is_stuck or len(framed) >= RING_BYTES - self._written + self._counters[_READ]:
            self._rest.append(memoryview(framed))
            self.push()
        else:
            self._write(framed)

    def push(self) -> None:
        """Write the part of the waiting messages that fits the ring.

        While messages wait, a flag in the ring is set. After setting the flag, the writer writes
        at least one byte. The reader of this byte sees the flag, and rings the doorbell of the
        writer once there is space.
        """
        if not self.is_stuck:
            self.is_stuck = True
            self._counters[_STUCK] = 1
        while self._rest:
            piece = self._rest.popleft()
            room = RING_BYTES - self._written + self._counters[_READ]
            if len(piece) < room:
                if not self._rest:
                    self.is_stuck = False
                    self._counters[_STUCK] = 0
                self._write(piece)
                continue
            num_bytes = min(room, len(piece) - 1)
            self._rest.appendleft(piece[num_bytes:])
            if num_bytes:
                self._write(piece[:num_bytes])
            return

    def _write(self, piece: "bytes | memoryview") -> None:
        start = self._written % RING_BYTES
        end = start + len(piece)
        if end <= RING_BYTES:
            self._data[start:end] = piece
        else:
            cut = RING_BYTES - start
            self._data[start:] = piece[:cut]
            self._data[: end - RING_BYTES] = piece[cut:]
        self._written += len(piece)
        if self._fence is not None:
            self._fence()
        self._counters[_WRITTEN] = self._written
        self._doorbell()


class Inlet:
    """The reading end of a ring.

    Args:
        memory: the memory of the ``Outlet``.
        doorbell: doorbell of the writer.
        fence: orders loads and stores; None if not needed.
    """

    __slots__ = ("_counters", "_data", "_doorbell", "_fence", "_part", "_read")

    def __init__(self, memory: memoryview, doorbell: Semaphore, fence: Fence) -> None:
        self._counters = memory[:HEAD_BYTES].cast("Q")
        self._data = memory[HEAD_BYTES : HEAD_BYTES + RING_BYTES]
        self._doorbell = doorbell.post
        self._fence = fence
        self._read = 0
        self._part = bytearray()

    def receive(self) -> list[bytes] | None:
        """Return the complete messages; None if no bytes have arrived."""
        counters, read = self._counters, self._read
        written = counters[_WRITTEN]
        if written == read:
            return None
        if self._fence is not None:
            self._fence()
        is_stuck = counters[_STUCK]
        start = read % RING_BYTES
        end = start + written - read
        came = self._data[start:end].tobytes()
        if end > RING_BYTES:
            came += self._data[: end - RING_BYTES].tobytes()
        if self._fence is not None:
            self._fence()
        self._read = counters[_READ] = written
        if is_stuck:
            self._doorbell()
        if not self._part and int.from_bytes(came[:_LENGTH_BYTES], "little") == len(came) - 8:
            return [came[_LENGTH_BYTES:]]
        self._part += came
        return self._complete()

    def _complete(self) -> list[bytes]:
        part, start = self._part, 0
        messages = []
        while len(part) - start >= _LENGTH_BYTES:
            first = start + _LENGTH_BYTES
            end = first + int.from_bytes(part[start:first], "little")
            if end > len(part):
                break
            messages.append(bytes(part[first:end]))
            start = end
        del part[:start]
        return messages
