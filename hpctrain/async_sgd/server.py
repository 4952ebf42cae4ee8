"""Parameter servers: each keeps a part of the parameters, steps it and hands it out."""

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.async_sgd.layout import VALUES, ParameterLayout, Piece, Slots
from hpctrain.async_sgd.requirements import Roles
from hpctrain.comm.direct_messages import DirectMessages, Message
from hpctrain.comm.node.shared_memory import combine_to
from hpctrain.comm.ops import Op, combination, scaled_when
from hpctrain.core.errors import CommError, HpctrainError, MismatchError, NotFiniteError
from hpctrain.core.units import by_rank
from hpctrain.gradients.elementwise import PieceStep
from hpctrain.gradients.rail_sums import weighted
from hpctrain.gradients.sample_count import exponent_of

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
    is_counted: bool  # whether its weight is of a number of samples that was given
    not_finite: str = ""  # name of a parameter whose gradient is NaN or infinite, if that counts
    is_near: bool = False  # whether it is of the server's node
    parts: Sequence[Tensor] = ()  # its gradient, at the server: what that has of each block

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
    """The last request of a rank, which no server answers."""

    where: str  # the rank leaves the values settled at, for messages; empty after an error


class Answer(NamedTuple):
    """What a server answers."""

    clock: int = 0  # of the worker
    staleness: int = 0  # of the values in clocks; of a gradient in updates of others
    has_values: bool = False  # in the slot of the worker, or with the message
    error: HpctrainError | None = None


class ParameterServer(ABC):
    """Keeps one part of all parameters and their optimizer state, and answers requests.

    The optimizer is of the same class as the workers', stepping pieces of parameters. All that
    happens here happens in the order in which requests come: on a thread beside the training, in
    a world of one while its rank waits.
    """

    def __init__(  # noqa: PLR0913 - whom it serves, what it has, and how it steps
        self,
        messages: "DirectMessages | OwnMessages",
        layout: ParameterLayout,
        slots: Slots,
        roles: Roles,
        optimizer: Optimizer,
        *,
        bound: float = math.inf,
        warmup: int = 0,
    ) -> None:
        """Take the place of this rank's server.

        A worker gets values at clock c once all workers are at c - ``bound`` or later, and the
        first one, whose own reads do not wait for that, is at ``warmup`` or later.
        """
        self._messages, self._layout, self._slots, self._roles = messages, layout, slots, roles
        self._bound, self.warmup = bound, warmup
        self._clocks: dict[int, float] = dict.fromkeys(roles.workers, 0)
        self._last_clock = 0  # that any worker has had
        self._settled: dict[int, str] = {}  # where ranks are that have
        self._left: set[int] = set()  # ranks that send no more requests
        self._waiting: dict[int, int] = {}  # ranks that wait for values, and at what clocks
        self._number = roles.servers.index(roles.rank)
        self._pieces = list(layout.pieces(self._number))
        whole = slots.of(roles.rank, VALUES)
        self._values = [torch.empty_like(part) for part in layout.parts(whole, self._number)]
        self._sums = [torch.empty_like(part) for part in self._values]
        self._held = self._tensors_in(self._values)
        self._stepper = PieceStep(optimizer)
        # Hooks would keep the method alive as long as the server's thread runs.
        self._attributes = {
            name: value
            for name, value in vars(optimizer).items()
            if name not in {"state", "step"} and not name.endswith("_hooks")
        }
        self._error: HpctrainError | None = None

    def start(self) -> None:
        """Serve until every rank has left."""
        self._messages.serve(self._serve)

    def move(
        self,
        messages: "DirectMessages | OwnMessages",
        slots: Slots,
        roles: Roles,
        numbers: Mapping[int, int],
    ) -> None:
        """Serve in a world of those that are left, who ask again what they have asked last.

        ``numbers`` are those of today, by those in the world before; what the others have told
        and what has not been stepped by is dropped. Once nobody asks.
        """
        self._messages, self._slots, self._roles = messages, slots, roles
        self._clocks = renumbered(self._clocks, numbers)
        self._waiting.clear()
        self._settled.clear()
        self._left = {numbers[rank] for rank in self._left if rank in numbers}
        self._renumber(numbers)
        with torch.no_grad():
            self._after_clock()
        self.start()

    # -- its state, for the rank it is on while nobody asks anything ----------------------------

    @torch.no_grad()
    def load(self, optimizer: Optimizer) -> None:
        """Take over the values of the parameters, and the optimizer's state of them."""
        self._stepper.state.clear()
        for piece, tensor in zip(self._pieces, self._held, strict=True):
            parameter = self._layout.parameters[piece.number]
            tensor.copy_(self._layout.row(piece.number, parameter)[piece.inside])
            for name, value in optimizer.state.get(parameter, {}).items():
                self._stepper.state[tensor][name] = self._part_of(name, value, piece)

    def _part_of(self, name: str, value: Any, piece: Piece) -> Any:
        """Return a copy of what belongs to a piece, of an entry of the state of its parameter."""
        if not isinstance(value, Tensor):
            return value
        if name != "step" and value.shape == self._layout.parameters[piece.number].shape:
            value = self._layout.row(piece.number, value)[piece.inside]
        return value.detach().to("cpu", copy=True)

    def state(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the number of each parameter that it has a piece of, and the state of that."""
        both = zip(self._pieces, self._held, strict=True)
        return [(piece.number, dict(self._stepper.state[tensor])) for piece, tensor in both]

    # -- requests -----------------------------------------------------------------------------

    @torch.no_grad()
    def _serve(self, requests: Sequence[Message]) -> bool:
        """Carry out requests; return whether every rank has left.

        An error is sent to all ranks, at once and in answer to each further request.
        """
        for source, request, tensors in requests:
            try:
                if self._error is None:
                    self._do(source, request, tensors)
                    self._answer_waiting()
                    continue
                asking: Sequence[int] = [] if isinstance(request, Leave) else [source]
            except Exception as error:  # whatever it is, all ranks raise it
                text = f"the parameter server on rank {self._roles.rank} has failed: {error!r}"
                self._error = CommError(text)
                if isinstance(error, MismatchError | NotFiniteError):
                    self._error = error
                asking = range(self._roles.size)
            for rank in asking:
                self._messages.replies.send(rank, Answer(error=self._error))
        self._left.update(one.source for one in requests if isinstance(one.content, Leave))
        return len(self._left) == self._roles.size

    def _do(
        self, source: int, request: Push | Read | Settle | Leave, tensors: Sequence[Tensor]
    ) -> None:
        if isinstance(request, Leave):
            if request.where:
                self._note_settled(source, request.where)
        elif isinstance(request, Read):
            self._waiting[source] = request.clock
        elif isinstance(request, Settle):
            self._note_settled(source, request.where)
            if len(self._settled) == self._roles.size:
                self._settle()
        else:
            if request.not_finite:
                raise NotFiniteError(
                    f"gradients must be finite, but that of {request.not_finite} on rank {source} "
                    f"is not; go back to a checkpoint with a smaller learning rate, or call "
                    f"skip_step() in place of such a step"
                )
            clock = request.clock + 1
            if self._clocks[source] == clock:  # asked again, in the world of those that are left
                self._waiting[source] = clock
                return
            self._clocks[source] = clock
            self._last_clock = max(self._last_clock, clock)
            if source in self._slots:
                whole = self._slots.of(source, request.slot)
                tensors = self._layout.parts(whole, self._number)
            push = request._replace(parts=tensors, is_near=source in self._slots)
            staleness = self._push(source, push)
            self._after_clock()
            if request.reads:
                self._waiting[source] = clock
            else:
                self._messages.replies.send(source, Answer(clock, staleness))

    def _answer_waiting(self) -> None:
        for source, clock in [*self._waiting.items()]:
            first = self._roles.workers[0]
            is_warm = source == first or self._clocks.get(first, math.inf) >= self.warmup
            if is_warm and min(self._clocks.values(), default=math.inf) >= clock - self._bound:
                del self._waiting[source]
                self._hand_out(source, clock)

    def _hand_out(self, source: int, clock: int) -> None:
        is_near = source in self._slots
        whole = self._slots.of(source if is_near else self._roles.rank, VALUES)
        out = self._layout.parts(whole, self._number)
        if not is_near:
            out = [torch.empty_like(part) for part in out]
        answer = Answer(clock, self._read(source, clock, out), has_values=True)
        self._messages.replies.send(source, answer, () if is_near else out)

    def _note_settled(self, source: int, where: str) -> None:
        """Let nobody wait for a rank; raise ``MismatchError`` if another has settled elsewhere."""
        self._clocks.pop(source, None)
        self._settled.setdefault(source, where)  # who has closed stays there
        if len({*self._settled.values()}) > 1:
            told = [self._settled.get(rank, "its steps") for rank in range(self._roles.size)]
            raise MismatchError(
                f"all ranks come to the same settle(), finish() or end of the block, "
                f"{by_rank(told)}; call them on every rank"
            )
        self._after_clock()

    def _settle(self) -> None:
        """Tell all ranks the values in which all updates are, and begin anew at one clock."""
        self._settled.clear()
        self._clocks = dict.fromkeys(self._roles.workers, self._last_clock)
        self._begin(self._last_clock)
        for rank in range(self._roles.size):
            self._hand_out(rank, self._last_clock)

    # -- what kinds of servers differ in ------------------------------------------------------

    @abstractmethod
    def _push(self, source: int, push: Push) -> int:
        """Take a gradient; return its staleness where that is known."""

    def _after_clock(self) -> None:
        """Do what is due when a worker's clock has advanced, or a worker has ended."""
        return

    @abstractmethod
    def _read(self, source: int, clock: int, out: Sequence[Tensor]) -> int:
        """Write to ``out`` what a worker at a clock shall have; return a staleness."""

    def _begin(self, clock: int) -> None:
        """Forget what belongs to the steps before this one; all ranks read values next."""
        del clock

    @abstractmethod
    def _renumber(self, numbers: Mapping[int, int]) -> None:
        """Keep what workers have told that are left, by their numbers of today."""

    # -- steps --------------------------------------------------------------------------------

    def _step(self, pushes: Sequence[Push], settings: Settings, num_missing: int = 0) -> None:
        """Step on the weighted mean of some gradients; those without weight are zeros.

        Those that are missing count as zeros, each of the usual weight.
        """
        having = [any(of) for of in zip(*(one.has_gradient for one in pushes), strict=True)]
        by_group: defaultdict[int, list[Tensor]] = defaultdict(list)
        grads = self._tensors_in(self._mean(pushes, num_missing))
        for piece, tensor, grad in zip(self._pieces, self._held, grads, strict=True):
            if having[piece.number]:
                tensor.grad = grad
                by_group[piece.group].append(tensor)
        self._stepper.read(SimpleNamespace(**self._attributes | {"param_groups": settings}))  # type: ignore[arg-type]
        self._stepper.step(by_group)
        for tensor in self._held:
            tensor.grad = None

    def _mean(self, pushes: Sequence[Push], num_missing: int) -> Sequence[Tensor]:
        """Return the mean, with the bits of ``DistributedOptimizer`` on one node and on two."""
        if len(pushes) == 1 and pushes[0].weight and not num_missing:
            return pushes[0].parts  # with the bits of a plain loop
        nodes = [n for near in (True, False) if (n := [p for p in pushes if p.is_near is near])]
        top = 2.0 ** exponent_of(max(one.weight for one in pushes))  # no product overflows
        total = sum(sum(one.weight for one in node) for node in nodes) / top
        total += num_missing * total / len(pushes)
        scale = None if total == 1.0 else 1.0 / (total or 1.0)
        for block, out in enumerate(self._sums):
            how = combination(out.dtype, Op.SUM)
            early, late = scaled_when(scale, how) if len(nodes) > 1 else (scale, None)
            sums = [out, *(torch.empty_like(out) for _ in nodes[1:])]
            for into, node in zip(sums, nodes, strict=True):
                parts = weighted([p.parts[block] for p in node], [p.weight / top for p in node])
                combine_to(into, parts, how, early)
            if len(nodes) > 1:
                combine_to(out, sums, how, late)
        return self._sums

    def _tensors_in(self, parts: Sequence[Tensor]) -> list[Tensor]:
        return [parts[piece.block][piece.place] for piece in self._pieces]

    def _copy_to(self, out: Sequence[Tensor]) -> None:
        for copied, part in zip(out, self._values, strict=True):
            copied.copy_(part)


class OwnChannel(list[Message]):
    """Messages of one kind, of the only rank of a world to itself."""

    def send(self, to: int, content: object, tensors: Sequence[Tensor] = ()) -> None:
        """Send one."""
        self.append(Message(to, content, tensors))

    def receive(self) -> list[Message]:
        """Return what has come."""
        came = self[:]
        self.clear()
        return came


class OwnMessages:
    """What ``DirectMessages`` are in a world of one: its server works while the rank waits."""

    def __init__(self) -> None:
        """Begin with none."""
        self.requests, self.replies = OwnChannel(), OwnChannel()

    def serve(self, work: Callable[[Sequence[Message]], bool]) -> None:
        """Take the function that carries out requests."""
        self._work = work

    def wait(self, done: Callable[[], object]) -> float:
        """Let the server work, and take its answers; return the seconds waited."""
        self._work(self.requests.receive())
        done()
        return 0.0

    def stop(self) -> None:
        """No-op: there is no thread."""

    close = stop

    def leave(self, ranks: Sequence[int], content: object) -> None:
        """No-op: the server ends with its rank."""


def renumbered(values: Mapping[int, Any], numbers: Mapping[int, int]) -> dict[int, Any]:
    """Return values by the rank of today, of those ranks that are left."""
    return {numbers[rank]: value for rank, value in values.items() if rank in numbers}


def copied(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the state of a piece."""
    return {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
