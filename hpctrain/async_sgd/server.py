"""Parameter servers: threads that keep a part of the parameters, step it and hand it out."""

import math
import threading
from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.async_sgd.layout import Buffers, ParameterLayout, Piece
from hpctrain.comm.agreement import by_rank
from hpctrain.comm.direct_messages import SERVING, DirectMessages, Message
from hpctrain.comm.mpi_world import is_loss
from hpctrain.comm.waiting import wait_until
from hpctrain.core.errors import MismatchError
from hpctrain.gradients.elementwise import PieceStep

BY_MESSAGE = -1  # in the place of the number of a copy in node memory

Settings = list[dict[str, Any]]
"""Of each group of an optimizer all but its parameters."""


class Push(NamedTuple):
    """What a worker tells a server after a backward."""

    clock: int  # of the worker before this
    slot: int  # where its gradient lies in its node memory
    weight: float  # that its gradient has in a mean
    has_gradient: bytes  # of each parameter, whether it has one
    settings: Settings
    reads: bool  # whether it wants values back
    is_counted: bool = False  # whether its weight is of a number of samples that was given

    @property
    def kind(self) -> str:
        """The settings as a text that two ranks can compare."""
        plain = [
            {k: v.tolist() if isinstance(v, Tensor) else v for k, v in one.items()}
            for one in self.settings
        ]
        return str(plain)


class Read(NamedTuple):
    """A worker wants values."""

    clock: int


class Settle(NamedTuple):
    """A rank takes no more steps until all have come here."""

    where: str  # for messages


class Leave(NamedTuple):
    """A rank takes no more steps at all, and wants no answer."""


class Answer(NamedTuple):
    """What a server answers."""

    clock: int  # of the worker
    staleness: int = 0  # of the values in clocks; of a gradient in updates of others
    copy: int | None = None  # where the values are, see ``Buffers.values``; None for no values
    error: str = ""
    is_mismatch: bool = False  # kind of the error


class Gradient(NamedTuple):
    """A gradient at a server: its part of each block."""

    push: Push
    parts: Sequence[Tensor]


class ParameterServer:
    """Keeps one part of all parameters and their optimizer state, and answers requests.

    The optimizer is of the same class as the workers', stepping pieces of parameters. All that
    happens here happens on one thread, in the order in which requests come.
    """

    def __init__(  # noqa: PLR0913 - whom it serves, what it has, and how it steps
        self,
        messages: DirectMessages,
        layout: ParameterLayout,
        buffers: Buffers,
        *,
        rank: int,
        number: int,
        num_ranks: int,
        workers: Sequence[int],
        optimizer: Optimizer,
        bound: float = math.inf,
    ) -> None:
        """Take the place of this server: the ``number``-th, on a ``rank``.

        A worker gets values at clock c once all workers are at c - ``bound`` or later.
        """
        self._messages, self._layout, self._buffers = messages, layout, buffers
        self._rank, self._number, self._num_ranks = rank, number, num_ranks
        self._workers, self._bound = list(workers), bound
        self._clocks: dict[int, float] = dict.fromkeys(workers, 0)
        self._last_clock = 0  # that any worker has had
        self._settled: dict[int, str] = {}  # where ranks are that have
        self._left: set[int] = set()
        self._waiting: list[tuple[int, int]] = []  # ranks that wait for values, at what clocks
        self.values = buffers.values(rank, number)
        self._sums = [torch.empty_like(part) for part in self.values]
        self._pieces = list(layout.pieces(number))
        self._held = self._tensors_in(self.values)
        self._stepper = PieceStep(optimizer)
        self._stepper.read(optimizer)
        self._attributes = {k: v for k, v in vars(optimizer).items() if k not in {"state", "step"}}
        self._error: Answer | None = None
        self._is_stopped = False
        self._inbox: list[Message] = []
        self._thread = threading.Thread(target=self._run, name="hpctrain-server", daemon=True)

    def start(self) -> None:
        """Serve from now on."""
        self._thread.start()

    def stop(self) -> None:
        """Serve no more. Harmless the second time."""
        self._is_stopped = True
        if self._thread.is_alive():
            self._thread.join()

    # -- its state, for the rank it is on while nobody asks anything ----------------------------

    @torch.no_grad()
    def load(self, optimizer: Optimizer) -> None:
        """Take over the values of the parameters, and the optimizer's state of them."""
        self._stepper.state.clear()
        for piece, tensor in self._with_pieces():
            parameter = self._layout.parameters[piece.number]
            tensor.copy_(parameter.detach().reshape(-1)[piece.inside])
            for name, value in optimizer.state.get(parameter, {}).items():
                self._stepper.state[tensor][name] = _part_of(name, value, parameter, piece)

    def state(self) -> list[tuple[Piece, dict[str, Any]]]:
        """Return the optimizer's state of each piece."""
        return [(piece, dict(self._stepper.state[t])) for piece, t in self._with_pieces()]

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        torch.set_grad_enabled(False)  # of this thread
        while not self._is_stopped:
            try:
                wait_until(self._has_work, lambda _: None, SERVING)
                inbox, self._inbox = self._inbox, []
                for message in inbox:
                    self._take(message)
            except Exception as error:
                if not is_loss(error):
                    raise
                return  # who waits finds by itself that a rank is lost

    def _has_work(self) -> bool:
        self._inbox += self._messages.requests.receive()
        return self._is_stopped or bool(self._inbox)

    def _take(self, message: Message) -> None:
        """Do what a request asks; an error is told to all ranks, now and whenever one asks."""
        if self._error is not None:
            self._messages.replies.send(message.source, self._error)
            return
        try:
            self._do(message)
            self._answer_waiting()
        except Exception as error:  # whatever it is, all ranks raise it
            is_mismatch = isinstance(error, MismatchError)
            text = f"the parameter server on rank {self._rank} has failed: {error!r}"
            text = str(error) if is_mismatch else text
            self._error = Answer(0, error=text, is_mismatch=is_mismatch)
            for rank in range(self._num_ranks):
                self._messages.replies.send(rank, self._error)

    def _do(self, message: Message) -> None:
        source, request = message.source, message.content
        if isinstance(request, Settle):
            self._clocks.pop(source, None)
            self._settled[source] = request.where
            self._check_settled()
            self._after_clock()
            if len(self._settled) == self._num_ranks:
                self._settle()
        elif isinstance(request, Leave):
            self._clocks.pop(source, None)
            self._left.add(source)
            self._after_clock()
        elif isinstance(request, Read):
            self._waiting.append((source, request.clock))
        elif isinstance(request, Push):
            parts: Sequence[Tensor] = message.tensors
            if self._buffers.shares_with(source):
                parts = self._buffers.gradient_of(source, request.slot, self._number)
            self._clocks[source] = request.clock + 1
            self._last_clock = max(self._last_clock, request.clock + 1)
            staleness = self._push(source, Gradient(request, parts))
            self._after_clock()
            if request.reads:
                self._waiting.append((source, request.clock + 1))
            else:
                self._messages.replies.send(source, Answer(request.clock + 1, staleness))

    def _answer_waiting(self) -> None:
        late = []
        for source, clock in self._waiting:
            if not self._may_read(source, clock):
                late.append((source, clock))
                continue
            copy = BY_MESSAGE
            if self._buffers.shares_with(source):
                copy = self._buffers.copy_for(source)
                out = self._buffers.values(self._rank, self._number, copy)
            else:
                out = [torch.empty_like(part) for part in self.values]
            staleness, is_held = self._read(source, clock, out)
            self._hand_out(source, Answer(clock, staleness, 0 if is_held else copy), out)
        self._waiting = late

    def _hand_out(self, source: int, answer: Answer, out: Sequence[Tensor]) -> None:
        if self._buffers.shares_with(source):
            self._messages.replies.send(source, answer)
            return
        tensors = [part.clone() for part in self.values] if answer.copy == 0 else out
        self._messages.replies.send(source, answer._replace(copy=BY_MESSAGE), tensors)

    def _check_settled(self) -> None:
        if len({*self._settled.values()}) > 1 or self._left:
            told = self._settled | dict.fromkeys(self._left, "close()")
            raise MismatchError(
                f"all ranks come to the same settle(), finish() or end of the block, "
                f"{by_rank([told.get(rank, 'its steps') for rank in range(self._num_ranks)])}; "
                f"call them on every rank"
            )

    def _settle(self) -> None:
        """Tell all ranks the values in which all updates are, and begin anew at one clock."""
        self._settled.clear()
        self._clocks = dict.fromkeys(self._workers, self._last_clock)
        self._begin(self._last_clock)
        for rank in range(self._num_ranks):
            self._hand_out(rank, Answer(self._last_clock, copy=0), ())

    # -- what kinds of servers differ in ------------------------------------------------------

    def _may_read(self, source: int, clock: int) -> bool:
        """Say whether a worker at a clock may have values now."""
        del source
        return min(self._clocks.values(), default=math.inf) >= clock - self._bound

    def _push(self, source: int, gradient: Gradient) -> int:
        """Take a gradient; return its staleness where that is known."""
        raise NotImplementedError

    def _after_clock(self) -> None:
        """Do what is due when a worker's clock has advanced, or a worker has ended."""

    def _read(self, source: int, clock: int, out: Sequence[Tensor]) -> tuple[int, bool]:
        """Return a staleness, and whether ``values`` serve; else write them to ``out``."""
        raise NotImplementedError

    def _begin(self, clock: int) -> None:
        """Forget what belongs to the steps before."""

    # -- steps --------------------------------------------------------------------------------

    def _step(self, gradients: Sequence[Gradient], settings: Settings, num_missing: int) -> bool:
        """Step on the weighted mean of some gradients, summed in this order.

        Those that are missing count as zeros, each of the usual weight.
        """
        total = sum(one.push.weight for one in gradients)
        total += num_missing * total / len(gradients)
        if not total:
            return False
        counted = [one for one in gradients if one.push.weight]  # others may hold anything
        for block, out in enumerate(self._sums):
            out.copy_(_weighted(counted[0], block))
            for one in counted[1:]:
                out.add_(_weighted(one, block))
            if total != 1.0:
                out.mul_(1.0 / total)
        having = [any(of) for of in zip(*(g.push.has_gradient for g in gradients), strict=True)]
        grads = self._tensors_in(self._sums)
        by_group: defaultdict[int, list[Tensor]] = defaultdict(list)
        for (piece, tensor), grad in zip(self._with_pieces(), grads, strict=True):
            if having[piece.number]:
                tensor.grad = grad
                by_group[piece.group].append(tensor)
        self._stepper.read(SimpleNamespace(**self._attributes | {"param_groups": settings}))  # type: ignore[arg-type]
        self._stepper.step(by_group)
        for tensors in by_group.values():
            for tensor in tensors:
                tensor.grad = None
        return True

    def _with_pieces(self) -> Sequence[tuple[Piece, Tensor]]:
        return list(zip(self._pieces, self._held, strict=True))

    def _tensors_in(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[piece.block][piece.place] for piece in self._pieces]


class ClockedServer(ParameterServer):
    """Applies the mean of a clock once all workers have told it; see ``StaleSynchronous``.

    Who reads ahead of the slowest gets values that were stepped further, on a copy, by what has
    come of the clocks before its own.
    """

    _bound: int

    def __init__(self, *args: Any, **options: Any) -> None:
        """Take what ``ParameterServer`` takes; ``bound`` is a number."""
        super().__init__(*args, **options)
        self._applied = 0  # clocks that are complete and in the values
        self._told: defaultdict[int, dict[int, Gradient]] = defaultdict(dict)

    def _push(self, source: int, gradient: Gradient) -> int:
        clock = gradient.push.clock
        for other, known in [*self._told[clock].items()][:1]:  # the others are like that one
            if known.push.kind != gradient.push.kind:
                raise MismatchError(
                    f"all workers take a step with the same settings, in step {clock} those of "
                    f"rank {source} differ from those of rank {other}: {gradient.push.kind:.300} "
                    f"and {known.push.kind:.300}; change learning rates after the same step on "
                    f"every rank"
                )
            has_both = known.push.weight and gradient.push.weight
            if has_both and known.push.is_counted != gradient.push.is_counted:
                raise MismatchError(
                    f"all workers say how many samples their gradients are of, or none does, in "
                    f"step {clock} only one of ranks {other} and {source} has; call "
                    f"set_num_samples() on every rank"
                )
        self._told[clock][source] = gradient
        return 0

    def _after_clock(self) -> None:
        least = min(self._clocks.values(), default=math.inf)
        while self._applied < least and self._applied in self._told:
            self._apply(self._told.pop(self._applied), 0)
            self._applied += 1

    def _read(self, source: int, clock: int, out: Sequence[Tensor]) -> tuple[int, bool]:
        del source
        staleness = clock - self._applied
        if not staleness:
            return 0, True
        held, state = self._held, self._stepper.state
        for copied, part in zip(out, self.values, strict=True):
            copied.copy_(part)
        try:
            self._held = self._tensors_in(out)
            self._stepper.state = defaultdict(dict)
            for tensor, before in zip(self._held, held, strict=True):
                if before in state:
                    self._stepper.state[tensor] = _copied(state[before])
            for told in range(self._applied, clock):
                missing = sum(other <= told for other in self._clocks.values())
                self._apply(self._told[told], missing)
        finally:
            self._held, self._stepper.state = held, state
        return staleness, False

    def _begin(self, clock: int) -> None:
        self._applied = clock
        self._told.clear()

    def _apply(self, told: Mapping[int, Gradient], num_missing: int) -> None:
        gradients = [told[rank] for rank in sorted(told)]
        self._step(gradients, gradients[0].push.settings, num_missing)


class ImmediateServer(ParameterServer):
    """Applies each gradient as it comes; see ``AsyncSGD`` and ``Downpour``."""

    def __init__(
        self, *args: Any, scales_rate: bool = False, warmup: int = 0, **options: Any
    ) -> None:
        """Take what ``ParameterServer`` takes.

        A rate is divided by the staleness if it ``scales_rate``. Nobody gets values before the
        first worker's clock is at ``warmup``, but that worker.
        """
        super().__init__(*args, **options)
        self._scales_rate, self._warmup = scales_rate, warmup
        self._num_updates: dict[int, int] = dict.fromkeys(self._workers, 0)
        self._seen: dict[int, int] = dict.fromkeys(self._workers, 0)
        self._staleness: dict[int, int] = {}

    def end_warmup(self) -> None:
        """Let all workers get values from now on; while nobody asks anything."""
        self._warmup = 0

    def _may_read(self, source: int, clock: int) -> bool:
        first = self._workers[0]
        is_warm = source == first or self._clocks.get(first, math.inf) >= self._warmup
        return is_warm and super()._may_read(source, clock)

    def _push(self, source: int, gradient: Gradient) -> int:
        staleness = self._updates_of_others(source) - self._seen[source]
        settings = gradient.push.settings
        if self._scales_rate and staleness > 1:
            settings = [{**one, "lr": one["lr"] / staleness} for one in settings]
        counts = gradient.push.weight > 0
        if counts and self._step(
            [Gradient(gradient.push._replace(weight=1.0), gradient.parts)], settings, 0
        ):
            self._num_updates[source] += 1
        self._staleness[source] = staleness
        return staleness

    def _read(self, source: int, clock: int, out: Sequence[Tensor]) -> tuple[int, bool]:
        del clock
        self._seen[source] = self._updates_of_others(source)
        for copied, part in zip(out, self.values, strict=True):
            copied.copy_(part)
        return self._staleness.get(source, 0), False

    def _begin(self, clock: int) -> None:
        del clock
        for worker in self._workers:
            self._seen[worker] = self._updates_of_others(worker)

    def _updates_of_others(self, worker: int) -> int:
        return sum(self._num_updates.values()) - self._num_updates[worker]


def _weighted(one: Gradient, block: int) -> Tensor:
    weight = one.push.weight
    return one.parts[block] if weight == 1.0 else one.parts[block] * weight


def _part_of(name: str, value: Any, parameter: Tensor, piece: Piece) -> Any:
    """Return a copy of what belongs to a piece, of an entry of the state of its parameter."""
    if not isinstance(value, Tensor):
        return value
    if name != "step" and value.shape == parameter.shape:
        value = value.detach().reshape(-1)[piece.inside]
    return value.detach().to("cpu", copy=True)


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
