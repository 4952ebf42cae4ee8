"""``ProgressEngine``, which one thread at a time drives to execute named operations."""

import time
from typing import TYPE_CHECKING, NamedTuple

from hpctrain.core.errors import CommError, HorovodInternalError, OperationMismatchError
from hpctrain.negotiation.execution import Executor, Phases
from hpctrain.negotiation.messages import OperationBatch
from hpctrain.negotiation.negotiator import Negotiator
from hpctrain.negotiation.reducing import neutral_request
from hpctrain.negotiation.request import Driver, Handle, Kind, Repeated, Request, TensorHandle
from hpctrain.negotiation.stall import Answers, Question, StallWatch
from hpctrain.negotiation.submission_queue import CLOSE, JOIN, SubmissionQueue

if TYPE_CHECKING:
    from torch import Tensor

    from hpctrain.comm.communicator import Communicator
    from hpctrain.negotiation.fast_path import FastPath, Known
    from hpctrain.negotiation.timeline import Timelines

_ALLREDUCE = Kind.ALLREDUCE.value  # stored, because ``Enum.value`` is a function call
_AT_ONCE = Handle(None, Request(Kind.BARRIER, None, ()))
"""Placeholder for the handle of an operation that ``reduce_now`` executes."""
_MANY = 8  # minimum number of operations for which ``announce_many`` is faster


class BreakOff(NamedTuple):
    """A control message that makes all pending operations fail on all ranks."""

    reason: str

    @property
    def kind(self) -> str:
        """Kind of the message, for ``QuestionRelay``."""
        return "break-off"

    def merged(self, _: "BreakOff") -> "BreakOff":
        """Return this message: the first one makes all operations fail."""
        return self

    def without(self, _: "BreakOff") -> None:
        """Return None: a second message has no effect."""


class ProgressEngine:
    """Runs the operations of this rank from announcement to completion.

    The constructor is collective. Any thread may use ``queue`` and ``questions``; one thread at a
    time calls the other methods.

    Args:
        comm: communicator of the operations.
        fusion_bytes: maximum size of a fused message.
        timelines: timelines of this rank.
        stalls: detects operations that some rank does not submit.
    """

    fast_path: "FastPath | None" = None  # None without node memory

    def __init__(
        self,
        comm: "Communicator",
        *,
        fusion_bytes: int,
        timelines: "Timelines",
        stalls: StallWatch,
    ) -> None:
        self.queue = SubmissionQueue()
        self.broken: BaseException | None = None  # error of all later operations
        self.comm, self.post = comm, comm.new_mailbox()  # the mailbox of the control messages
        self._executor = Executor(comm, fusion_bytes=fusion_bytes)
        self._negotiator = Negotiator(self.post.tree)
        self.questions = self._negotiator.relay.asked  # questions for all ranks
        if self.post.channel is not None:
            from hpctrain.negotiation.fast_path import FastPath  # noqa: PLC0415 - one rank needs no MPI

            self.fast_path = FastPath(comm, self.post, self._negotiator.cache)
        self._prepared: tuple[Handle, Known] | None = None
        """Operation that waits for rank 0 to commit or abort it."""
        self._aborted: Handle | None = None  # last aborted operation; needs control messages
        self.closing: Handle | None = None
        """Operation after which this rank announces no further operation."""
        self._is_closed = False  # whether other ranks closed the set after this rank joined
        self._executing: list[Handle] = []
        self._timelines, self._stalls = timelines, stalls
        stalls.num_children = len(self.post.tree.children)
        self.world_rank = stalls.world_rank

    def has_work(self) -> bool:
        """Return True if this rank has pending operations or questions."""
        queue = self.queue
        return bool(queue.in_flight or queue.joining or queue.submitted or self.questions)

    def advance(self) -> bool:
        """Process all control messages and execute all decided operations.

        Returns:
            True if an operation has completed or failed.
        """
        post, negotiator = self.post, self._negotiator
        is_done = False
        while True:
            for source, message in post.receive():
                negotiator.receive(source, message)
            is_done |= self._announce_submitted()
            is_committed = self._poll_prepared()
            is_done |= is_committed
            self._publish_busy()
            for to, message in negotiator.outbox(decide=self.broken is None):
                post.send(to, message)
            batches = negotiator.decided()
            if batches:
                self._publish_busy()
                post.flush(down=True)  # the ranks below need the decision to take part
                for batch in batches:
                    self._carry_out(batch)
                is_done = True
            has_answered = self._answer_questions()
            if self.broken is not None:
                return True
            if not has_answered and not batches and not is_committed:
                return is_done

    def start(self, handle: Handle) -> None:
        """Start ``handle`` on the fast path; complete it if the other ranks are ready in time.

        A no-op if another operation is in flight.
        """
        queue, submitted = self.queue, self.queue.submitted
        if len(submitted) != 1 or submitted[0] is not handle:
            return
        if len(queue.in_flight) != 1 or queue.held:
            return
        if self.questions or self.broken or self._timelines.current or not self._prepare(handle):
            return
        assert self.fast_path is not None
        submitted.remove(handle)
        self._settle(verdict=self.fast_path.poll_spinning())

    def reduce_now(
        self, driver: Driver, repeated: Repeated, tensor: "Tensor"
    ) -> TensorHandle | bool:
        """Reduce with the compiled kernel, if no other operation of this rank is in flight.

        Returns:
            True if the reduction is complete. False if it was not executed, because other
            operations are in flight or the kernel does not support the reduction. A handle if the
            reduction is still in progress; ``driver`` then waits for the handle.
        """
        queue, fast_path, name = self.queue, self.fast_path, repeated.name
        if fast_path is None or queue.in_flight or queue.submitted or queue.joining or queue.held:
            return False
        if self.questions or self.broken or self._timelines.current or self._negotiator.takes_part:
            return False
        known = fast_path.known(name, repeated.signature)
        if known is None or queue.in_flight.setdefault(name, _AT_ONCE) is not _AT_ONCE:
            return False
        verdict = fast_path.reduce_now(known, tensor)
        if verdict is None:
            handle = queue.in_flight[name] = TensorHandle(driver, repeated, tensor)
            self._prepared = handle, known
            self._stalls.last_call.enter()
            if self.broken is not None:  # another thread has failed since the check
                self.fail_all(self.broken)
            return handle
        queue.in_flight.pop(name, None)  # another thread may have failed all operations
        if verdict:
            self._stalls.last_call.note(_ALLREDUCE, name)
        if queue.held:
            queue.submit_held()
        return verdict

    def check_stalls(self) -> None:
        """Log finished stall reports; ask other ranks about operations that have waited long."""
        now = time.monotonic()
        self._exchange_answers(now, partial=True)
        question = self._stalls.due(now, self.queue.oldest())
        if question is not None:
            self.questions.append(question)

    def refuse(self, error: BaseException) -> None:
        """Fail the communicator and all later operations with ``error``. Any thread may call."""
        if not isinstance(error, CommError):
            error = HorovodInternalError(
                f"named operations must not be interrupted, but {error!r} was raised in an "
                f"operation of rank {self.world_rank}; end the program, or call "
                f"hpctrain.shutdown() and hpctrain.init() on every rank"
            )
        self.comm.fail()
        self.broken = self.broken or error

    def break_down(self, error: BaseException) -> None:
        """Fail all pending and later operations with ``error``. Called by the driving thread."""
        self.refuse(error)
        assert self.broken is not None
        executing, self._executing = self._executing, []
        for handle in executing:
            if not handle.is_done:
                handle.fail(self.broken)
        self.fail_all(self.broken)

    def shut_down(self) -> None:
        """Fail all pending and later operations."""
        self.broken = self.broken or HorovodInternalError(
            "an operation must complete before its process set is shut down, but this one was "
            "pending; wait for it before shutdown() or remove_process_set()"
        )
        self.fail_all(self.broken)

    def fail_all(self, error: BaseException) -> None:
        """Fail all pending operations of this rank with ``error``."""
        self._prepared = None
        for handle in self.queue.take_all():
            if not handle.is_done and handle is not _AT_ONCE:
                handle.fail(error)

    def _announce_submitted(self) -> bool:
        """Announce the submitted operations; return True if an operation failed."""
        queue, submitted = self.queue, self.queue.submitted
        if not submitted or self._prepared is not None:
            return False
        has_failed, timeline, announce = False, self._timelines.current, self._negotiator.announce
        is_alone = self.fast_path is not None and len(submitted) == 1
        if len(submitted) > _MANY and timeline is None:
            self._announce_many()
        while submitted:
            handle = submitted.popleft()
            if handle.name is JOIN:
                queue.joining.append(handle)
                self._negotiator.join()
                continue
            if timeline is not None and handle is not self._aborted:
                timeline.begin(handle.name, f"NEGOTIATE_{handle.request.kind.name}")
                timeline.rank_ready(handle.name, self.comm.rank)
            if is_alone and self._prepare(handle):
                break
            try:
                announce(handle.name, handle.signature)
            except CommError as error:  # this rank has joined
                if handle is self.closing:
                    continue  # a rank that has joined counts as having announced it
                queue.in_flight.pop(handle.name, None)
                queue.submit_held()
                handle.fail(error)
                has_failed = True
        if timeline is not None:
            timeline.flush()  # the operation may never complete
        return has_failed

    def _announce_many(self) -> None:
        """Announce the submitted operations together, if all of them are repeated."""
        queue = self.queue.submitted
        many = [queue.popleft() for _ in range(len(queue))]  # other threads may append
        repeated = [handle.repeated for handle in many]
        if None in repeated or not self._negotiator.announce_many(repeated):
            queue.extendleft(reversed(many))

    # -- without control messages, see fast_path --------------------------------------------

    def _prepare(self, handle: Handle) -> bool:
        """Prepare an operation on the fast path; return False if that is impossible."""
        fast_path = self.fast_path
        if fast_path is None or self._negotiator.takes_part or handle is self._aborted:
            return False
        known = fast_path.known(handle.name, handle.signature)
        if known is None:
            return False
        try:
            fast_path.prepare(known, handle)
        except Exception:  # control messages then make all ranks raise the error
            return False
        self._prepared = handle, known
        return True

    def _poll_prepared(self) -> bool:
        """Execute the prepared operation after a commit; announce the operation after an abort.

        Returns True if the operation was executed.
        """
        if self.fast_path is None or self._prepared is None:
            return False
        is_committed = self._settle(verdict=self.fast_path.commit.poll())
        self._announce_submitted()  # announces the other operations, if none is prepared
        return is_committed

    def _settle(self, *, verdict: bool | None) -> bool:
        assert self._prepared is not None
        fast_path = self.fast_path
        if verdict is None and not (
            self.queue.submitted and fast_path and fast_path.commit.withdraw()
        ):
            return False
        (handle, known), self._prepared = self._prepared, None
        if not verdict:
            self._aborted = handle
            self.queue.submitted.appendleft(handle)
            return False
        self._carry_out_known(handle, known)
        self.post.drain()  # clears the doorbell; the next ``advance`` receives all messages
        return True

    def _carry_out_known(self, handle: Handle, known: "Known") -> None:
        if not known.slots or self._timelines.current is not None:
            self._carry_out(OperationBatch((known.entry,)), known)
            return
        queue = self.queue
        del queue.in_flight[handle.name]
        self._reduce(handle, known)
        if queue.held:
            queue.submit_held()
        self._stalls.last_call.note(_ALLREDUCE, handle.name)

    def _reduce(self, handle: Handle, known: "Known") -> None:
        assert self.fast_path is not None
        try:
            handle.succeed(self.fast_path.reduced(known, handle))
        except Exception as error:  # ``wait`` raises the error
            handle.fail(error)
            self.break_down(error)  # the other ranks have executed the operation

    def _publish_busy(self) -> None:
        if self.fast_path is not None:
            self.fast_path.commit.set_busy(busy=self._negotiator.takes_part)

    def _carry_out(self, batch: OperationBatch, known: "Known | None" = None) -> None:
        timeline = self._timelines.current
        if timeline is not None:
            timeline.cycle()
            for entry in batch.entries:
                timeline.end(entry.name)
        handles = self._of_this_rank(batch)
        if handles:
            self._executing = handles
            if known is not None and known.slots:
                phases = Phases(self.comm, timeline, handles)
                phases.enter("MPI_ALLREDUCE")
                self._reduce(handles[0], known)
                phases.end()
            else:
                self._executor.carry_out(handles, timeline, batch)
            self._executing = []
            self._stalls.last_call.note(handles[-1].request.kind.value, handles[-1].name)
        if batch.join_over is not None:
            for handle in self.queue.end_join():
                handle.succeed([batch.join_over])
            if self.closing is not None:
                self.queue.submitted.append(self.closing)
        if self._is_closed or (self.closing is not None and self.closing.is_done):
            self.shut_down()

    def _of_this_rank(self, batch: OperationBatch) -> list[Handle]:
        """Return the handles of a batch on this rank; operations with an error fail here."""
        found, in_flight = [], self.queue.in_flight
        for entry in batch.entries:
            handle = in_flight.pop(entry.name, None)
            if entry.error is not None:
                if handle is not None:
                    handle.fail(OperationMismatchError(entry.error))
            elif handle is None:  # this rank has joined
                request = neutral_request(entry.signature, self.comm.size)
                found.append(Handle(None, request, entry.name))
                self._is_closed |= entry.name == CLOSE
            else:
                found.append(handle)
        self.queue.submit_held()
        return found

    def _answer_questions(self) -> bool:
        """Answer questions of other ranks; merge the answers of the ranks below."""
        relay, queue, now = self._negotiator.relay, self.queue, time.monotonic()
        questions = relay.take_questions()
        for question in questions:
            if isinstance(question, BreakOff):
                self.post.flush(down=True)  # send now, as ``advance`` is not called again
                self.broken = HorovodInternalError(question.reason)
                self.fail_all(self.broken)
            else:
                assert isinstance(question, Question)
                joined = bool(queue.joining)
                self._stalls.answer_to(now, question, queue.oldest(), joined=joined)
        if questions or relay.received:
            self._exchange_answers(now)
        return bool(questions or relay.answers)

    def _exchange_answers(self, now: float, *, partial: bool = False) -> None:
        """Merge the answers of the children; pass answers to the parent; log the reports.

        ``partial`` is True in one call per second. In this call, a rank passes answers to its
        parent even if some are missing, and the root allows the next question.
        """
        relay = self._negotiator.relay
        for answers in relay.take_received():
            assert isinstance(answers, Answers)
            self._stalls.take(answers)
        relay.answers += self._stalls.for_parent(now, partial=partial)
        self._stalls.log_reports(now)
        for question in self._stalls.take_finished() if partial else ():
            relay.finish(question)
