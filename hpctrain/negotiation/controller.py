"""``Controller``, which executes named operations in the same order on all ranks of a set."""

from contextlib import suppress
from typing import TYPE_CHECKING

from hpctrain.comm.owner import Owner
from hpctrain.comm.tensor_arguments import is_plain
from hpctrain.core.errors import CommError, HorovodInternalError
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.core.units import MIB
from hpctrain.negotiation.engine_driver import CLOSE_S, EngineDriver
from hpctrain.negotiation.pending_table import NUM_SLOTS
from hpctrain.negotiation.progress_engine import BreakOff, ProgressEngine
from hpctrain.negotiation.request import (
    Handle,
    Kind,
    ReduceOp,
    Repeated,
    Request,
    Result,
    Take,
    TensorHandle,
    through_host,
)
from hpctrain.negotiation.submission_queue import CLOSE, JOIN

if TYPE_CHECKING:
    from torch import Tensor

    from hpctrain.comm.communicator import Communicator
    from hpctrain.negotiation.stall import StallWatch
    from hpctrain.negotiation.timeline import Timelines


class Controller:
    """Accepts requests from any thread; executes a request when all ranks have submitted it.

    A caller that waits for an operation drives the ``ProgressEngine``. Without such a caller,
    the thread of the ``EngineDriver`` drives the engine. The constructor is collective over
    ``comm``: it creates mailboxes.

    Args:
        comm: communicator of the ranks, used by no other code; ``close`` closes it.
        timelines: timelines of this rank.
        stalls: detects operations that some rank does not submit.
        fusion_bytes: maximum size of a fused message.
        cycle_s: time that operations without a waiting caller are delayed, so that later
            operations can share their message.
        timeout_s: longest wait for other ranks.
    """

    def __init__(
        self,
        comm: "Communicator",
        *,
        timelines: "Timelines",
        stalls: "StallWatch",
        fusion_bytes: int = 64 * MIB,
        cycle_s: float = 0.0,
        timeout_s: float = float("inf"),
    ) -> None:
        self.comm = comm
        self._progress = ProgressEngine(
            comm, fusion_bytes=fusion_bytes, timelines=timelines, stalls=stalls
        )
        self._driver = EngineDriver(self._progress, cycle_s, timeout_s)
        self._stalls, self._is_open = stalls, True
        self._refusal: HorovodInternalError | None = None
        """Error that new operations raise on this rank; other ranks may accept operations."""
        self._repeated: dict[str, Repeated] = {}
        self._owner = Owner()

    @dynamo_disable
    def submit(
        self, request: Request, take: Take | None = None, *, is_awaited: bool = False
    ) -> Handle:
        """Start an operation and return its handle. Not collective.

        Args:
            request: the operation.
            take: function that converts the result to the return value of ``wait``.
            is_awaited: True if the caller calls ``wait`` next; ``wait`` then starts the operation.

        Raises:
            DuplicateNameError: an operation of this name is in flight on this rank.
        """
        if not all(tensor.is_cpu for tensor in request.tensors):
            request, take = through_host(request, take)
        handle = Handle(self._driver, request, take=take)
        self._enter(handle, is_awaited=is_awaited)
        return handle

    @dynamo_disable
    def submit_tensor(
        self,
        name: str,
        tensor: "Tensor",
        op: ReduceOp,
        prescale: float,
        postscale: float,
        *,
        is_awaited: bool = False,
    ) -> Handle | None:
        """Start a reduction that was passed to ``repeat``; return None if the signature differs.

        ``name`` is the name that was passed to ``repeat``; ``submit`` documents the other
        arguments.
        """
        repeated = self._repeated.get(name)
        if repeated is None or not repeated.fits(tensor, op, prescale, postscale):
            return None
        if 0 in tensor.stride():  # elements may share memory
            return None
        handle = TensorHandle(self._driver, repeated, tensor)
        self._enter(handle, is_awaited=is_awaited)
        return handle

    @dynamo_disable
    def reduce_now(
        self, name: str, tensor: "Tensor", op: ReduceOp, prescale: float, postscale: float
    ) -> bool:
        """Execute a reduction that was passed to ``repeat``, without a handle.

        Returns False, without an effect, if other operations of this rank are in flight, if the
        signature differs, or if the compiled kernel does not support the tensor. Raises the
        errors of ``Handle.wait``.
        """
        repeated = self._repeated.get(name)
        if (
            repeated is None
            or self._refusal is not None
            or not self._owner.is_here
            or not repeated.fits(tensor, op, prescale, postscale)
            or not is_plain(tensor)
            or tensor.is_inference()  # torch refuses to change it outside of inference mode
        ):
            return False
        try:
            return self._driver.reduce_now(repeated, tensor)
        except BaseException as error:
            self._fail_after(error)
            raise

    def repeat(self, name: str, request: Request) -> None:
        """Store the signature of an in-place reduction of one tensor, for ``submit_tensor``."""
        if len(self._repeated) >= NUM_SLOTS:
            self._repeated.clear()
        assert request.name is not None
        self._repeated[name] = Repeated(request.name, request.signature)

    @dynamo_disable
    def run(self, request: Request) -> Result:
        """Start an operation and wait for its result."""
        try:
            result: Result = self.submit(request, is_awaited=True).wait()
        except BaseException as error:
            self._fail_after(error)
            raise
        return result

    def start_join(self) -> Handle:
        """Start to contribute neutral values to all operations until all ranks have joined.

        The result of the handle is the rank that joined last. If MPI supports calls from several
        threads, the controller's thread executes the operations without a waiting caller.
        """
        handle = Handle(self._driver, Request(Kind.BARRIER, None, ()), JOIN)
        self._enter(handle)
        return handle

    def break_off(self, reason: str) -> None:
        """Fail all pending and all future operations on every rank. Not collective.

        A new controller can use the same communicator, see ``abandon``.
        """
        self._refusal = HorovodInternalError(reason)
        self._progress.questions.append(BreakOff(reason))
        self._driver.nudge()

    def refuse(self, reason: str) -> None:
        """Reject new operations on this rank, or accept them if ``reason`` is empty. Local."""
        self._refusal = HorovodInternalError(reason) if reason else None

    @property
    def is_broken(self) -> bool:
        """Whether the operations of this rank have failed; other ranks may not have failed yet."""
        return self._progress.broken is not None

    def shut_down(self) -> None:
        """Fail all operations, without a final synchronization of the ranks. Collective."""
        self._progress.shut_down()

    def close(self) -> None:
        """Close the controller and its communicator. Collective; never raises.

        Operations that only some ranks have submitted fail.
        """
        if self._owner.is_here:  # a forked child must not close
            self.abandon()
            self.comm.close()

    def abandon(self) -> None:
        """Close the controller; another controller can use its communicator. Collective."""
        if not self._is_open:
            return
        self._is_open = False
        self._refusal = self._refusal or HorovodInternalError(
            "a named operation must use an open process set, but this one was shut down; call "
            "hpctrain.init() or add_process_set() again"
        )
        # Execute decided operations first: the other ranks also execute them, with this rank.
        last = self._progress.closing = Handle(
            self._driver, Request(Kind.BARRIER, None, ()), CLOSE
        )
        self._enter(last, is_awaited=True)
        with suppress(CommError):
            self._driver.finish(last, CLOSE_S)
        self._driver.end()
        self._progress.post.close()

    def _fail_after(self, error: BaseException) -> None:
        """Fail all operations after an interrupt, since the caller may now change tensors."""
        if not isinstance(error, CommError):
            self._driver.fail(error)

    def _enter(self, handle: Handle, *, is_awaited: bool = False) -> None:
        self._owner.check()
        self._stalls.last_call.enter()
        progress = self._progress
        refusal = progress.broken or self._refusal
        if refusal is not None and handle is not progress.closing:
            raise refusal
        try:
            progress.queue.enter(handle)
            if progress.broken is not None:  # another thread has failed since the check
                progress.fail_all(progress.broken)
            if not is_awaited:
                self._driver.nudge()
        except BaseException as error:
            self._fail_after(error)
            raise

    def drop(self) -> None:
        """Close the controller without other ranks, which may be lost. Not collective."""
        self._is_open = False
        self._refusal = self._refusal or HorovodInternalError(
            "a named operation must have all ranks of its process set, but some ranks are lost"
        )
        self._driver.end()
