"""Horovod in this process: it begins, carries out one call after another, and ends."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mpi4py import MPI

from hpctrain.comm.agreement import by_rank
from hpctrain.comm.engines.horovod_library import Library, library
from hpctrain.comm.waiting import wait_request
from hpctrain.comm.watch import Watch
from hpctrain.core.errors import CommError, LaunchError

if TYPE_CHECKING:
    from hpctrain.core.config import Settings

_OURS = {
    "HOROVOD_CONTROLLER": "mpi",
    "HOROVOD_CPU_OPERATIONS": "mpi",
    "HOROVOD_DYNAMIC_PROCESS_SETS": "1",
    "HOROVOD_TIMELINE": None,  # the timeline of that name is ours: both cannot write one file
}
"""What Horovod must find in its environment, whatever the user has set; None for nothing."""


def begin(world: MPI.Intracomm, settings: "Settings") -> "Session":
    """Let Horovod serve the ranks of ``world``, numbered as they are. Collective.

    Where it serves the same ranks already, the session is shared.

    Args:
        world: all ranks; it is duplicated.
        settings: of rank 0: what Horovod's fusion and cycle are to be.

    Raises:
        LaunchError: some rank has no Horovod that works, or its Horovod serves other ranks; on
            every rank.
    """
    refusal, shared, here = None, False, None
    try:
        here = library()
        if here.session is None and here.torch.is_initialized():
            refusal = (
                "this program has called Horovod's own init(), and Horovod serves one world at a "
                "time; leave that call out, or call Horovod's shutdown() first"
            )
        elif here.session is not None and not here.session.serves(world):
            refusal = (
                "Horovod serves other ranks of this process already, and it serves one world at "
                "a time; shut that world down first, or set HPCTRAIN_ENGINE=hpctrain"
            )
        shared = refusal is None and here.session is not None
    except LaunchError as error:
        refusal = str(error)
    told = world.allgather((refusal, shared))
    if any(text for text, _ in told):
        raise LaunchError(by_rank([text for text, _ in told]))
    if len({is_shared for _, is_shared in told}) > 1:
        raise LaunchError(
            "Horovod serves some of these ranks already and not the others; shut that world down "
            "on every rank first"
        )
    assert here is not None
    if here.session is not None:
        return here.session.shared()
    here.session = Session(here, world, settings)
    return here.session


class Session:
    """Horovod at the service of the ranks of one world."""

    def __init__(self, here: Library, world: MPI.Intracomm, settings: "Settings") -> None:
        """Begin. Collective over ``world``; see ``begin``."""
        self.rank, self.size = world.rank, world.size
        self.version = here.version
        self.torch = here.torch
        """The module ``horovod.torch``."""
        self._library = here
        self._world = world.Dup()
        self._num_users = 1
        self._sets: dict[tuple[int, ...], Any] = {}
        self._uses: Counter[tuple[int, ...]] = Counter()
        with _environment(variables_for(settings)):
            here.torch.init(comm=self._world)

    @property
    def is_open(self) -> bool:
        """Whether ``close`` was not called yet by everyone."""
        return self._num_users > 0

    def serves(self, world: MPI.Intracomm) -> bool:
        """Say whether the session is of these ranks in this order. Not collective."""
        theirs, ours = world.Get_group(), self._world.Get_group()
        same = MPI.Group.Compare(theirs, ours) == MPI.IDENT
        theirs.Free()
        ours.Free()
        return same

    def shared(self) -> "Session":
        """Return the session to one more user of it."""
        self._num_users += 1
        return self

    def close(self) -> None:
        """End Horovod, if this is the last user. Collective over the world."""
        self._num_users -= 1
        if self._num_users:
            return
        self._library.session = None
        self.torch.shutdown()
        self._world.Free()

    # -- process sets -----------------------------------------------------------------------

    def process_set(self, ranks: Sequence[int]) -> Any:
        """Return Horovod's process set of these ranks, which a use is counted of.

        Collective over the world: also ranks outside of the set call it. Sets that nobody uses
        any more are removed, as every set takes part in every cycle of Horovod.

        Args:
            ranks: of the world, in any order: Horovod sorts them.
        """
        self.collect()
        key = tuple(sorted(ranks))
        if len(key) == self.size:
            return self.torch.global_process_set
        if key not in self._sets:
            self._sets[key] = self.torch.add_process_set(list(key))
        if self.rank in key:
            self._uses[key] += 1
        return self._sets[key]

    def use_again(self, ranks: Sequence[int]) -> None:
        """Count one more use of a process set that is there. Not collective."""
        self._uses[tuple(sorted(ranks))] += 1

    def leave(self, ranks: Sequence[int]) -> None:
        """Count one use less. Not collective."""
        self._uses[tuple(sorted(ranks))] -= 1

    def collect(self) -> None:
        """Remove the process sets that nobody uses any more. Collective over the world."""
        if not self._sets:
            return
        unused = {key for key in self._sets if self._uses[key] <= 0}
        everywhere = set.intersection(*self._world.allgather(unused))
        for key in sorted(everywhere):
            self.torch.remove_process_set(self._sets.pop(key))
            del self._uses[key]

    # -- operations -------------------------------------------------------------------------

    def run(self, start: Callable[[], int], watch: Watch) -> Any:
        """Start an operation and return its result; sleep meanwhile and look for lost ranks.

        Args:
            start: submits it and returns Horovod's handle.
            watch: looks at the others.

        Raises:
            CommError: Horovod refuses it, or fails.
            RankLostError: a rank was lost meanwhile. Horovod may still use the tensors.
        """
        try:
            handle = start()
            wait_request(_Request(self.torch, handle), watch)
            return self.torch.synchronize(handle)
        except (self._library.internal_error, ValueError) as error:
            raise CommError(
                f"Horovod {self.version} could not do it: {error}; see what it has printed, or "
                f"set HPCTRAIN_ENGINE=hpctrain"
            ) from error


class _Request:
    """A handle of Horovod's, to be waited for as a request of MPI is."""

    def __init__(self, torch: Any, handle: int) -> None:
        self._poll = torch.poll
        self._handle = handle

    def Test(self, _status: object = None) -> bool:  # noqa: N802 - MPI's name
        done: bool = self._poll(self._handle)
        return done


def variables_for(settings: "Settings") -> dict[str, str | None]:
    """Return what Horovod must find in its environment beside what the user has set.

    Its own fusion and cycle are part of the settings, where ours are not set.
    """
    found = dict(_OURS)
    if settings.fusion_bytes is not None:
        found["HOROVOD_FUSION_THRESHOLD"] = str(settings.fusion_bytes)
    if settings.cycle_s is not None:
        found["HOROVOD_CYCLE_TIME"] = f"{1000 * settings.cycle_s:.6g}"
    return found


@contextmanager
def _environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables for a while; None takes one away."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, text in values.items():
        if text is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = text
