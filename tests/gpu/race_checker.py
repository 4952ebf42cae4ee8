"""Find races between streams with happens-before analysis, without an accelerator.

``CheckedDevice`` replaces the device of the program: its streams and events only record vector
clocks, its memory is host memory, and every operation runs immediately. Results are therefore
correct even where synchronization is missing; the checker reports that it is missing. Two accesses
to the same bytes, of which at least one is a write, are a race unless a chain of program order,
launches, events and host waits orders them. Each actor, a stream or a thread of the host, has a
vector clock.

Memory counts as device memory if it was passed to ``Checker.on_device``, allocated by the device,
or produced by an operation that reads device memory; all other memory is host memory. An operation
on host memory alone belongs to the host; an operation on device memory belongs to the current
stream. Reading a value, and a copy between host and device that may block, is a host wait.

A caching allocator reuses freed memory for the next tensor of the same stream. The accesses of
other streams must therefore be ordered before the reuse, or the streams must have been passed to
``record_stream``.
"""

import bisect
import contextlib
import threading
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from hpctrain.comm.device import Device

Clock = dict[str, int]

WAITING = ("_local_scalar_dense", "equal", "is_nonzero", "nonzero")
"""Operations whose result the host wants to know."""


class Access(NamedTuple):
    """Hold one access of an actor to a range of bytes."""

    first: int
    end: int
    is_write: bool
    actor: str
    number: int
    what: str


@dataclass
class Memory:
    """Hold one allocation."""

    first: int
    end: int
    is_device: bool
    actor: str  # stream or thread that allocated the memory
    storage: StorageWeakRef
    users: set[str] = field(default_factory=set)  # streams passed to ``record_stream``
    accesses: list[Access] = field(default_factory=list)


class Checker:
    """Record the accesses of all threads of a program; ``races`` lists each race once, as text."""

    def __init__(self) -> None:
        self.races: dict[str, None] = {}
        self.clocks: defaultdict[str, Clock] = defaultdict(dict)
        self._number = 0
        self._memories: list[Memory] = []  # sorted by address
        self._freed: list[Memory] = []  # freed device memory that its stream has not reused yet
        self._here = threading.local()

    @property
    def host(self) -> str:
        """Return the name of the current thread of the host."""
        return getattr(self._here, "host", "host")

    @property
    def stream(self) -> str:
        """Return the name of the current stream of this thread."""
        stack = getattr(self._here, "streams", None)
        return stack[-1] if stack else self.default_stream

    @property
    def default_stream(self) -> str:
        """Return the name of this rank's default compute stream."""
        return f"{getattr(self._here, 'rank', '')}compute"

    def name(self, rank: str) -> None:
        """Set the rank of this thread."""
        self._here.rank, self._here.host = f"{rank} ", f"{rank} host"

    @property
    def prefix(self) -> str:
        """Return the prefix of the names of this rank's streams."""
        return getattr(self._here, "rank", "")

    @contextlib.contextmanager
    def on(self, stream: str) -> Generator[None]:
        """Make ``stream`` the current stream inside the block."""
        stack = self._here.__dict__.setdefault("streams", [])
        stack.append(stream)
        try:
            yield
        finally:
            stack.pop()

    @contextlib.contextmanager
    def thread(self, name: str) -> Generator[None]:
        """Act inside the block as another host thread, which was started by this thread."""
        was, streams = self.host, self._here.__dict__.get("streams", [])
        self.join(name, self.clocks[was])
        self._here.host, self._here.streams = name, []
        try:
            yield
        finally:
            self._here.host, self._here.streams = was, streams

    def join(self, actor: str, state: Clock) -> None:
        """Merge a clock into the clock of an actor."""
        self._look_for_freed()
        mine = self.clocks[actor]
        for other, number in state.items():
            mine[other] = max(mine.get(other, 0), number)

    def on_device(self, *tensors: Tensor) -> None:
        """Mark the tensors as device memory."""
        for tensor in tensors:
            self._memory_of(tensor).is_device = True
            self._reuse(self.stream)

    def used_by(self, tensor: Tensor, stream: str) -> None:
        """Record that ``record_stream`` was called for a tensor and a stream."""
        self._memory_of(tensor).users.add(stream)

    def _memory_of(self, tensor: Tensor, *, is_device: bool = False) -> Memory:
        storage = tensor.untyped_storage()
        first, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        place = bisect.bisect_right(self._memories, first, key=lambda memory: memory.first)
        if place and (known := self._memories[place - 1]).end > first:
            return known  # also where another storage has the same bytes
        found = Memory(first, end, is_device, self.stream, StorageWeakRef(storage))
        self._memories.insert(place, found)
        return found

    def _look_for_freed(self) -> None:
        for memory in [memory for memory in self._memories if memory.storage.expired()]:
            self._memories.remove(memory)
            if memory.is_device:
                self._freed.append(memory)

    def _reuse(self, actor: str) -> None:
        """Let a stream reuse the freed memory that the stream had allocated."""
        known = dict(self.clocks[actor])
        for other, number in self.clocks[self.host].items():  # as of the launch
            known[other] = max(known.get(other, 0), number)
        for memory in [memory for memory in self._freed if memory.actor == actor]:
            owners = {actor, self.host, *memory.users}
            early = [
                access
                for access in memory.accesses
                if access.actor not in owners and known.get(access.actor, 0) < access.number
            ]
            for access in early:
                self._tell(f"{access.what} on {access.actor}", f"a new tensor on {actor}")
            self._freed.remove(memory)

    def _tell(self, one: str, other: str) -> None:
        self.races[f"{one} beside {other}"] = None

    def run(
        self, what: str, reads: Sequence[Tensor], writes: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        """Record an operation of the current stream, or of the host."""
        self._look_for_freed()
        given = [*((t, False) for t in reads), *((t, True) for t in writes)]
        touched = [(self._memory_of(t), t, is_write) for t, is_write in given if t.numel()]
        is_device = any(memory.is_device for memory, _, _ in touched)
        if is_shape_alone(what):
            touched = [each for each in touched if each[2]]
        new = [(self._memory_of(t, is_device=is_device), t, True) for t in made if t.numel()]
        actor = self.stream if is_device else self.host
        if actor != self.host:
            self.join(actor, self.clocks[self.host])  # a launch follows what the host has seen
        if is_device and made:
            self._reuse(actor)
        self._number += 1
        self.clocks[actor][actor] = self._number
        for memory, tensor, is_write in [*touched, *new]:
            self._note(memory, Access(*_bytes_of(tensor), is_write, actor, self._number, what))

    def wait(self) -> None:
        """Order the host after the current stream."""
        self.join(self.host, self.clocks[self.stream])

    def is_device(self, tensor: Tensor) -> bool:
        """Return True if a tensor is in device memory."""
        return self._memory_of(tensor).is_device

    def _note(self, memory: Memory, new: Access) -> None:
        known, kept = self.clocks[new.actor], []
        for old in memory.accesses:
            is_over = old.actor == new.actor or known.get(old.actor, 0) >= old.number
            meets = old.first < new.end and new.first < old.end
            is_own = old.number == new.number  # both accesses are of the same operation
            if meets and (old.is_write or new.is_write) and not (is_over or is_own):
                self._tell(f"{old.what} on {old.actor}", f"{new.what} on {new.actor}")
            covers = new.first <= old.first and old.end <= new.end
            says_more = new.is_write or (not old.is_write and old.actor == new.actor)
            if not (covers and says_more and is_over):
                kept.append(old)
        memory.accesses = [*kept, new]


def is_shape_alone(what: str) -> bool:
    """Return True if an operation reads only the shape of a tensor."""
    return what.startswith("new_") or what.split(".", maxsplit=1)[0].endswith("_like")


def _bytes_of(tensor: Tensor) -> tuple[int, int]:
    first = tensor.data_ptr()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return first, first + (sum((n - 1) * s for n, s in steps) + 1) * tensor.itemsize


class Watching(TorchDispatchMode):
    """Report all operations of this thread to a checker."""

    def __init__(self, checker: Checker) -> None:
        super().__init__()
        self.checker = checker

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        """Run an operation and report its reads and writes."""
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        schema = function._schema
        reads, writes = [], []
        given = [*zip(schema.arguments, args, strict=False)]
        given += [(one, kwargs[one.name]) for one in schema.arguments if one.name in kwargs]
        for argument, value in given:
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_write else reads).extend(_tensors_in(value))
        if any(one.alias_info and not one.alias_info.is_write for one in schema.returns):
            return result  # a view moves no data
        made = [t for t in _tensors_in(result) if not any(t is one for one in writes)]
        name = function.__name__
        self.checker.run(name, reads, writes, made)
        if name.split(".")[0] in WAITING or self._may_block(name, reads, writes, args):
            self.checker.wait()
        return result

    def _may_block(
        self, name: str, reads: list[Tensor], writes: list[Tensor], args: tuple[Any, ...]
    ) -> bool:
        """Return True for a copy between host and device without ``non_blocking``."""
        if not name.startswith("copy_") or (len(args) > 2 and args[2]):
            return False
        tensors = [*reads, *writes]
        return len({self.checker.is_device(tensor) for tensor in tensors if tensor.numel()}) > 1


def _tensors_in(value: object) -> Iterator[Tensor]:
    items: Iterable[object] = value if isinstance(value, list | tuple) else (value,)
    return (t for t in items if isinstance(t, Tensor) and t.device.type == "cpu")


class CheckedStream:
    """Represent a stream by its name."""

    def __init__(self, checker: Checker, name: str) -> None:
        self.checker, self.name = checker, name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CheckedStream) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def wait_event(self, event: "CheckedEvent") -> None:
        """Order later work after the last recording of the event, as CUDA does."""
        self.checker.join(self.name, self.checker.clocks[self.checker.host])
        self.checker.join(self.name, event.state)

    def synchronize(self) -> None:
        """Order the host after the stream."""
        self.checker.join(self.checker.host, self.checker.clocks[self.name])


class CheckedEvent:
    """Hold the clock of a stream at the last recording; empty before the first."""

    def __init__(self, checker: Checker) -> None:
        self.checker, self.state = checker, Clock()

    def record(self, stream: CheckedStream) -> None:
        """Store the current clock of the stream."""
        checker = self.checker
        checker.join(stream.name, checker.clocks[checker.host])
        self.state = dict(checker.clocks[stream.name])

    def synchronize(self) -> None:
        """Order the host after the recording."""
        self.checker.join(self.checker.host, self.state)


class CheckedDevice(Device):
    """Replace ``hpctrain.comm.device.Device``."""

    keeps_apart = "it is checked by itself"

    def __init__(self, checker: Checker) -> None:
        self.checker, self._num_streams = checker, 0
        self.device = torch.device("cpu")
        self.down, self.up = self.new_stream("down"), self.new_stream("up")

    def new_stream(self, name: str = "") -> Any:
        self._num_streams += 1
        name = name or f"stream {self._num_streams}"
        return CheckedStream(self.checker, f"{self.checker.prefix}{name}")

    def new_event(self) -> Any:
        return CheckedEvent(self.checker)

    def current_stream(self) -> Any:
        return CheckedStream(self.checker, self.checker.stream)

    def on(self, stream: Any) -> contextlib.AbstractContextManager[object]:
        return self.checker.on(stream.name)

    def zeros(self, numel: int, dtype: torch.dtype, users: Sequence[Any]) -> Tensor:
        made = torch.zeros(numel, dtype=dtype)
        self.checker.on_device(made)
        for stream in users:
            self.record_use(made, stream)
        return made

    def record_use(self, tensor: Tensor, stream: Any) -> None:
        self.checker.used_by(tensor, stream.name)

    def pin(self, host: Tensor, owner: object, last: Any) -> bool:  # noqa: ARG002 - as there
        return True

    def pinned(self, like: Tensor) -> Tensor:
        return torch.empty(like.shape, dtype=like.dtype)  # host memory


def ranks_in_turn(num_ranks: int, program: Callable[[int, "Meeting"], None]) -> None:
    """Run a program on ranks that are threads: one runs at a time, until it synchronizes."""
    meeting = Meeting(num_ranks)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        meeting.take(rank)
        try:
            program(rank, meeting)
        except BaseException as error:
            errors.append(error)
        meeting.leave(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


class Meeting:
    """Synchronize threads; one thread runs at a time, in the order of ranks."""

    def __init__(self, num_ranks: int) -> None:
        self._turn, self._changed = 0, threading.Condition()
        self._here: dict[int, Any] = {}
        self._round: list[Any] = []
        self._left: set[int] = set()
        self.num_ranks = num_ranks

    def take(self, rank: int) -> None:
        """Wait until it is this rank's turn to run."""
        with self._changed:
            self._changed.wait_for(lambda: self._turn == rank)

    def leave(self, rank: int) -> None:
        """Let the other ranks continue without this rank."""
        self._left.add(rank)
        self._pass_on(rank)

    def exchange(self, rank: int, given: Any) -> list[Any]:
        """Pass an object, wait for all ranks and return the objects of all ranks."""
        self._here[rank] = given
        if len(self._here) + len(self._left - set(self._here)) == self.num_ranks:
            self._round, self._here = [self._here.get(one) for one in range(self.num_ranks)], {}
            found = self._round
            self._pass_on(rank)
            self.take(rank)
            return found
        self._pass_on(rank)
        self.take(rank)
        return self._round

    def _pass_on(self, rank: int) -> None:
        others = [(rank + step) % self.num_ranks for step in range(1, self.num_ranks + 1)]
        with self._changed:
            self._turn = next((one for one in others if one not in self._left), -1)
            self._changed.notify_all()
