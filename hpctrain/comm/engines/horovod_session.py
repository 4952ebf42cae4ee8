"""Horovod in this process: it is loaded, begins, carries out one call after another, and ends."""

import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from mpi4py import MPI
from torch import Tensor

from hpctrain.cluster.libraries import family, loaded_libmpi
from hpctrain.comm.agreement import by_rank
from hpctrain.comm.waiting import Watch, wait_request
from hpctrain.core.errors import CommError, LaunchError
from hpctrain.launch.installed_horovod import installed

if TYPE_CHECKING:
    from hpctrain.core.config import Settings


class Library:
    """Horovod as it is loaded into this process: there is one of it, and it serves one world."""

    def __init__(self, version: str, torch: Any) -> None:
        self.version = version
        self.torch = torch
        """The module ``horovod.torch``."""
        self.internal_error: type[Exception] = torch.HorovodInternalError
        self.session: Session | None = None
        """The world that it serves at present."""


@functools.cache
def library() -> Library:
    """Load Horovod, MPI being loaded; modules that stand in for it are left as they are.

    Raises:
        LaunchError: it is not installed, does not load, or was built for another MPI.
    """
    if problem := _problem():
        raise LaunchError(_remedy(problem))
    with _unveiled():
        try:
            package = importlib.import_module("horovod")
            torch = importlib.import_module("horovod.torch")
        except (ImportError, OSError) as error:
            raise LaunchError(_remedy(f"Horovod does not load: {error}")) from error
        return Library(package.__version__, torch)


def _problem() -> str:
    """Say what keeps Horovod from being loaded, before it brings another MPI; else empty."""
    found = installed()
    if found is None:
        return "Horovod is not installed"
    if not found.needs:
        return "Horovod was built without PyTorch or without MPI"
    here = loaded_libmpi()
    if here and found.family not in [family(path) for path in here]:
        return f"Horovod was built for another MPI ({found.needs}) than {here[0]}"
    return ""


def _remedy(what: str) -> str:
    return (
        f"{what}, and the engine horovod needs it; `hpctrain horovod build` builds it for this "
        f"Python and MPI, HPCTRAIN_ENGINE=hpctrain does without"
    )


@contextmanager
def _unveiled() -> Iterator[None]:
    """Take away what stands in for Horovod, for a while; what was loaded then is kept apart.

    Where nothing stands in for it, what is loaded stays for all.
    """
    stands_in = {name: one for name, one in _modules() if not _is_real(name, one)}
    finders = list(sys.meta_path)
    sys.meta_path[:] = [one for one in finders if not getattr(one, "hpctrain_shim", False)]
    is_veiled = bool(stands_in) or len(sys.meta_path) < len(finders)
    for name in stands_in:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.meta_path[:] = finders
        if is_veiled:
            for name, _ in _modules():
                del sys.modules[name]
            sys.modules.update(stands_in)


def _modules() -> list[tuple[str, ModuleType]]:
    return [
        (name, one) for name, one in sys.modules.items() if name.partition(".")[0] == "horovod"
    ]


def _is_real(name: str, module: ModuleType) -> bool:
    spec = getattr(module, "__spec__", None)
    stands_in = vars(module).get("__hpctrain_shim__", False)
    return spec is not None and spec.name == name and not stands_in


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

    def process_set(self, ranks: Sequence[int]) -> Any:
        """Return Horovod's process set of these ranks, which stays until the session ends.

        Collective over the world: also ranks outside of the set call it.

        Args:
            ranks: of the world, in any order: Horovod sorts them.
        """
        key = tuple(sorted(ranks))
        if len(key) == self.size:
            return self.torch.global_process_set
        if key not in self._sets:
            self._sets[key] = self.torch.add_process_set(list(key))
        return self._sets[key]

    def remove_sets(self) -> None:
        """Remove all process sets: each takes part in every cycle. Collective over the world."""
        for key in sorted(self._sets):
            self.torch.remove_process_set(self._sets.pop(key))

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


class Levels:
    """The process sets of this rank's node and of the ranks of its number on all nodes.

    A sum is formed inside each node, where each rank gets its part of it; the parts are summed
    over the nodes; then the ranks of a node gather them.
    """

    def __init__(self, session: "Session", nodes: Sequence[Sequence[int]]) -> None:
        """Make the process sets. Collective over the world.

        Args:
            session: of all ranks.
            nodes: ranks of each node, as many on every one.
        """
        self._session, self._hvd = session, session.torch
        on_nodes = [sorted(ranks) for ranks in nodes]
        across = [list(ranks) for ranks in zip(*on_nodes, strict=True)]
        sets = [(ranks, session.process_set(ranks)) for ranks in (*on_nodes, *across)]
        self._node, self._rail = (made for ranks, made in sets if session.rank in ranks)
        self._local_size = len(on_nodes[0])

    def carries(self, values: Tensor) -> bool:
        """Say whether every rank gets a part of so many values."""
        return values.numel() >= self._local_size

    def allreduce_(self, values: Tensor, name: str, watch: Watch) -> None:
        """Replace flat ``values`` by their sum over all ranks. Collective.

        Args:
            values: of a dtype that Horovod sums.
            name: of this operation.
            watch: looks at the others during waits.
        """
        hvd, node, rail = self._hvd, self._node, self._rail

        def run(start: Any, given: Tensor, step: str, **options: Any) -> Any:
            begin = partial(start, given, name=f"{name}: {step}", **options)
            return self._session.run(begin, watch)

        part = run(hvd.reducescatter_async, values, "node", op=hvd.Sum, process_set=node)
        run(hvd.allreduce_async_, part, "rail", op=hvd.Sum, process_set=rail)
        values.copy_(run(hvd.allgather_async, part, "publish", process_set=node))
