"""Base of the process group: ordering, errors and shutdown of its operations."""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.comm.communicator import Communicator
from hpctrain.comm.owner import Owner
from hpctrain.comm.process_group.work import Operation, OperationQueue, Several
from hpctrain.comm.waiting import InStepError, Limit, Watch
from hpctrain.core.errors import CommError, MismatchError, RankLostError
from hpctrain.core.torch_compat import (
    HashStore,
    PrefixStore,
    Store,
    backend_of,
    group_by_nccl,
    hidden_from_modes,
    num_dispatch_modes,
)
from hpctrain.core.units import format_ranks

if TYPE_CHECKING:
    from hpctrain.comm.mpi import MpiCommunicator
    from hpctrain.comm.rail.rail import MpiWire

    Base: Any
else:
    Base = dist.ProcessGroup

Method = TypeVar("Method", bound=Callable[..., Any])


class GroupError(dist.DistBackendError, CommError):
    """An operation of a group of torch.distributed has failed."""


class GroupRankLostError(dist.DistBackendError, RankLostError):
    """A rank died, left or was too late for an operation of a group of torch.distributed."""


class RefusedError(InStepError, GroupError, ValueError):
    """A rank has rejected the arguments of a call; the other ranks raise an error, too."""


_LISTS = (list, tuple)
OLDER_NAMES = {
    "all_gather_single": "_allgather_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single": "_reduce_scatter_base",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}
"""Names of methods before torch 2.13, by present name."""


def on_cpu(method: Method) -> Method:
    """Decorate a method: calls with tensors on other devices go to the backend of the device."""

    @functools.wraps(method)
    def call(self: "OrderedGroup", given: Any, *args: Any, **options: Any) -> Any:
        first = given
        while type(first) in _LISTS and first:
            first = first[0]
        if isinstance(first, Tensor):
            if not first.is_cpu:
                other, name = self.group_of(first.device), method.__name__
                name = name if hasattr(other, name) else OLDER_NAMES[name]
                return getattr(other, name)(given, *args, **options)
            if first.is_quantized:
                raise GroupError(
                    f"tensors must not be quantized, got {first.dtype}; send int_repr(), the "
                    f"scale and the zero point"
                )
        return method(self, given, *args, **options)

    return cast("Method", call)


def _refusal(name: str, result: Any, *, averages: bool) -> str:
    """Return why an operation cannot write the tensors of ``result``; empty if it can."""
    if type(result) in _LISTS:
        for each in result:
            if reason := _refusal(name, each, averages=averages):
                return reason
        return ""
    if averages and result.dtype is torch.bool:
        return (
            "an average must be of numbers, got bool; convert the tensor, or use ReduceOp.MIN "
            "(true on all ranks) or MAX (true on any)"
        )
    if result.layout is not torch.strided or result.is_contiguous() or name == "gather":
        return ""  # for gather, ``result`` is the input
    if any(s == 0 < n - 1 for s, n in zip(result.stride(), result.shape, strict=True)):
        return (
            f"elements of a tensor that receives values must not share memory, got a tensor of "
            f"shape {tuple(result.shape)} from expand(); call contiguous() first"
        )
    return ""


REPORT_S = 1.0  # a rank that waits longer reports this in the store, for messages of other ranks
_MAX_S = 1e6  # unlimited, for other backends
_REFUSED = "nothing: "  # start of the call of a rank that has refused its arguments


class OrderedGroup(Base):  # type: ignore[misc]
    """Base of the process group, which runs its operations in order.

    Collectives run in the order of the calls: synchronous collectives on the caller's thread, and
    asynchronous collectives on a thread of the group. Messages are sent and received concurrently
    with collectives.

    The constructor is collective.

    Args:
        comm: ranks of the group; ``shutdown`` closes it.
        name: name under which torch registers the group.
        ranks: rank in the world of each rank of the group.
        limit: limit of the waits of ``comm``.
        store: store of the group, in which ranks also report long waits.
        has_thread: whether asynchronous operations run on a thread.
    """

    def __init__(
        self,
        comm: Communicator,
        *,
        name: str,
        ranks: Sequence[int],
        limit: Limit,
        store: Store,
        has_thread: bool,
    ) -> None:
        super().__init__(comm.rank, comm.size)
        self.comm = comm
        self._ranks = list(ranks)
        self._owner = Owner()
        self._name, self._description = name, ""
        self._limit = limit
        self._store: Store = store
        self._watch: Watch | None = None  # None in a group of one rank
        self._wire: MpiWire | None = None
        if comm.size > 1:
            ranks_of_mpi = cast("MpiCommunicator", comm)
            self._watch, self._wire = ranks_of_mpi.watch, ranks_of_mpi.new_wire()
        self._wire_lock = threading.Lock()
        self.queue = OperationQueue(f"hpctrain group {name}", has_thread=has_thread)
        self._num_started = 0
        self._current: Operation | None = None  # the operation that runs now
        limit.on_late = self._report_wait
        self._coalesced: list[dist.Work] | None = None
        self._others: dict[str, Any] = {}

    # -- execution of operations ------------------------------------------------------------

    def _start(
        self,
        name: str,
        function: Callable[[], object],
        result: Any,
        opts: Any,
        *,
        averages: bool = False,
    ) -> dist.Work:
        self._owner.check()
        if reason := _refusal(name, result, averages=averages):
            function = functools.partial(self._refuse, reason)
        if num_dispatch_modes():
            # Selective recomputation counts operations, which may also run on the queue's thread.
            function = hidden_from_modes(function)
        self._num_started = number = self._num_started + 1
        operation = Operation(self._guard, function, result, name, number)
        is_sync = getattr(opts, "asyncOp", None) is False  # unknown before torch 2.7
        if is_sync and self.queue.begin():
            try:
                self._guard(operation)
            finally:
                self.queue.end()
        else:
            try:
                self.queue.start(operation)
                if is_sync:
                    operation.wait()
            except BaseException as error:
                if error is not operation.error:
                    self._break_off()
                raise
        if self._coalesced is not None:
            self._coalesced.append(operation)
        return operation

    def _break_off(self) -> None:
        """Fail the group after an exception in the wait for a queued operation.

        On return the thread of the queue no longer writes to memory of the caller.
        """
        if self._watch is None:
            return
        before, self._limit.broken_off = self._limit.broken_off, "the call was interrupted"
        try:
            self.queue.drain(self._guard)
            self._watch.fail()
        finally:
            self._limit.broken_off = before

    def _guard(self, operation: Operation) -> None:
        """Run an operation; if it fails, raise an error with its name and the missing ranks."""
        self._current = operation
        try:
            self._limit.check()
            if self._watch is None:
                operation.function()
            else:
                self._watch.keep_in_step(operation.function)
        except CommError as error:
            if isinstance(error, MismatchError) and _REFUSED in str(error):
                self.comm.rejoin()  # all ranks raise for this call, and the group remains usable
            lost = self._missing() if isinstance(error, RankLostError) else []
            missing = f"; {format_ranks(lost)} did not call {operation.name}" if lost else ""
            what = f"{operation.name}, number {operation.number}"
            raise self._named(what, error, missing) from error

    def _named(self, what: str, error: CommError, missing: str = "") -> CommError:
        """Return an error like ``error`` whose message names the operation ``what``."""
        kind: type[CommError] = GroupError
        if isinstance(error, RefusedError):
            kind = RefusedError
        elif isinstance(error, RankLostError):
            kind = GroupRankLostError
        return kind(
            f"{what} of group {self._name} of {format_ranks(self._ranks)}, failed on rank "
            f"{self._ranks[self.comm.rank]}: {error}{missing}"
        )

    def _meet(self, call: str) -> None:
        """Wait until all ranks have begun the same ``call``; raise if the calls differ."""
        if self.comm.size > 1:
            cast("MpiCommunicator", self.comm).check_call(call)

    def _refuse(self, reason: str) -> NoReturn:
        """Raise on all ranks: ``MismatchError`` on ranks that have begun a different call."""
        self._meet(f"{_REFUSED}{reason}")
        raise RefusedError(reason)

    def _report_wait(self, waited_s: float) -> None:
        """Report in the store that this rank waits, before other ranks can reach their limit."""
        current = self._current
        if (
            current
            and not current.has_reported
            and waited_s > min(REPORT_S, self._limit.timeout_s / 2)
        ):
            current.has_reported = True
            with contextlib.suppress(RuntimeError):  # rank 0, which serves the store, has ended
                self._store.set(f"waits/{current.number}/{self.comm.rank}", current.name)

    def _missing(self) -> list[int]:
        """Return the ranks that have not reported that they wait in the current operation."""
        current = self._current
        if current is None or not current.has_reported:
            return []
        with contextlib.suppress(RuntimeError):
            keys = {rank: f"waits/{current.number}/{rank}" for rank in range(self.comm.size)}
            return [self._ranks[r] for r, key in keys.items() if not self._store.check([key])]
        return []

    def _start_coalescing(self, _: torch.device) -> None:
        self._coalesced = []

    def _end_coalescing(self, _: torch.device) -> dist.Work:
        works, self._coalesced = self._coalesced or [], None
        return cast("dist.Work", Several(works))

    # -- interface of ProcessGroup ----------------------------------------------------------

    def name(self) -> str:
        """Return the name of the backend."""
        return "hpctrain"

    getBackendName = name  # noqa: N815 - called by C++

    def getGroupName(self) -> str:  # noqa: N802
        """Return the name under which torch registers the group."""
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set the name under which torch registers the group."""
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        """Return the description that the user gave."""
        return self._description

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set the description that the user gave."""
        self._description = description

    def get_group_store(self) -> Store:
        """Return the store of the group."""
        return self._store

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the limit of later waits."""
        self._limit.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout
    supports_splitting = supports_coalescing = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return False, so that FSDP2 allocates its own buffers."""
        del device
        return False

    @property
    def _device_types(self) -> list[torch.device]:
        cuda = torch.cuda.is_available() and dist.is_nccl_available()
        return [torch.device("cpu")] + [torch.device("cuda")] * cuda

    def _get_backend(self, device: torch.device) -> Any:
        if device.type == "cpu":
            return self
        if device.type not in {one.type for one in self._device_types}:  # for torch 2.6
            raise GroupError(
                f"tensors of a group of backend hpctrain must be on the CPU, or on CUDA if torch "
                f"has NCCL, got {device}; move them first"
            )
        return backend_of(self.group_of(device), device)

    def group_of(self, device: torch.device) -> Any:
        """Return a process group of the same ranks for tensors on another device.

        For CUDA the backend is NCCL, which connects through the store of this group.
        """
        if device.type != "cuda" or not dist.is_nccl_available():
            raise GroupError(
                f"tensors must be on the CPU, or on CUDA if torch has NCCL, got one on {device}; "
                f"move it first"
            )
        if "cuda" not in self._others:
            self._others["cuda"] = self._by_nccl()
        return self._others["cuda"]

    def _by_nccl(self) -> dist.ProcessGroup:
        timeout = timedelta(seconds=min(self._limit.timeout_s, _MAX_S))
        store = PrefixStore("cuda/", self._store)
        return group_by_nccl(store, self.comm.rank, self.comm.size, timeout)

    def _set_sequence_number_for_group(self) -> None:
        """No-op: operations are always numbered."""

    def _get_sequence_number_for_group(self) -> int:
        return self._num_started

    def shutdown(self) -> None:
        """Complete started operations and free the resources of the group. Collective."""
        self.queue.close()
        for other in self._others.values():
            other.shutdown()
        # Freed now: until garbage collection the store would keep serving its port, and ranks
        # could connect to it in place of the next store on this port.
        self._store = HashStore()
        self._others.clear()
        if not self._limit.broken_off:
            self._limit.broken_off = (
                "a group must be open when it is used, but this one was destroyed; create a new "
                "one"
            )
            self.comm.close()

    def abort(self) -> None:
        """Make all waits of this rank raise, without freeing resources. Not collective."""
        self._limit.broken_off = (
            "a group must be open when it is used, but this one was aborted on this rank; destroy "
            "it and create a new one"
        )
        for other in self._others.values():
            other.abort()
