"""The base of methods whose workers go by the values of parameter servers."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.connection import Farewell, connected
from hpctrain.async_sgd.layout import VALUES, ParameterLayout, Slots
from hpctrain.async_sgd.requirements import (
    Roles,
    Servers,
    first_not_finite,
    require_servable,
)
from hpctrain.async_sgd.server import (
    Answer,
    Leave,
    ParameterServer,
    Push,
    Read,
    Settings,
    Settle,
)
from hpctrain.async_sgd.staleness import StalenessHistogram
from hpctrain.async_sgd.step_hooks import StepHooks
from hpctrain.checkpoint.format.state_hash import value_hashes
from hpctrain.collectives.parameters import broadcast_parameters
from hpctrain.comm.agreement import agreed, require_equal
from hpctrain.comm.common_block import CommonBlock
from hpctrain.core.checks import Amount, checked
from hpctrain.core.errors import ConfigError, HpctrainError
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.gradients.sample_count import check_count
from hpctrain.gradients.step_counter import check_over
from hpctrain.runtime import recovery, world
from hpctrain.runtime.last_check import LastStates
from hpctrain.runtime.process_sets import global_process_set


class AsyncMethod(CommonBlock):
    """Hooks a plain optimizer: a step sends the gradient to the servers and takes their values.

    The training loop stays as it is, but for ``with``. Workers may take different numbers of
    steps: one that leaves the block holds back nobody, and waits there for the others, so that
    all ranks have one model behind it. Where an error leads a rank out of the block, those that
    wait in it raise within seconds.

    Values and optimizer state of the parameters lie on the servers, each of which is a thread
    beside the training on its rank. Parameters that change outside of ``step()`` are an error at
    the next one, or at the end, unless ``reload`` gives them to the servers; but what is written
    in place through ``.data`` is lost. In a world of one the rank is its own server, in turn.
    """

    def __init__(  # noqa: PLR0913 - what methods differ in
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        make_server: Callable[..., ParameterServer],
        servers: Servers,
        curvature: float | None,
        alike: Mapping[str, object],
        num_slots: int = 1,
        server_optimizer: Callable[[list[Tensor]], Optimizer] | None = None,
    ) -> None:
        """Give all ranks the model of rank 0, start the servers and hook the optimizer.

        Collective. ``alike`` are arguments that are the same on every rank, by name;
        ``num_slots`` gradients of a worker are under way at once; servers step as what
        ``server_optimizer`` makes of the parameters, where that is another one.
        """
        here, name = world.current(), type(self).__name__
        self.model, self.optimizer = model, optimizer
        self.comm, self._presence = here.comm, here.presence
        self.is_compared = here.settings.check_weights != "off"
        """Whether ranks that end with different values, and did not settle, are an error."""
        with agreed(self.comm, ConfigError):
            require_servable(name, model, optimizer)
            if curvature is not None:
                checked("curvature", curvature, Amount)
            self._roles = Roles.of(servers, self.comm.rank, self.comm.size)
        self.servers = self._roles.servers
        """Ranks that have a part of the parameters."""
        self.workers = self._roles.workers
        """Ranks that take steps."""
        self.waited_s = 0.0  # seconds in which the last step waited for servers
        self._histogram = StalenessHistogram(curvature)
        self._samples, self._is_counted = (1.0, 1.0), False
        self._clock, self._num_slots, self._is_settled = 0, num_slots, True
        self._has_ended = False  # the block, with values and state in model and optimizer
        self._known: list[tuple[int, int]] = []  # what parameters were when servers gave them
        self._error: HpctrainError | None = None  # of a server
        self._layout = ParameterLayout(optimizer, len(self.servers))
        names = {id(p): text for text, p in model.named_parameters()}
        self._names = [names[id(p)] for p in self._layout.parameters]
        parameters = self._layout.parameters
        self.server_optimizer = server_optimizer(parameters) if server_optimizer else optimizer
        """Whose step servers take, and where its state is while it is here."""
        self._take_state()
        require_equal(
            self.comm,
            self._describe({"servers": self.servers, **alike}),
            "optimizer, arguments and parameters",
            "build the same model, optimizer and method on every rank",
        )
        broadcast_parameters(model.state_dict())
        self._connect()
        self._start_server(make_server)
        around = self._begin_step, self._end_step
        self._hooks = StepHooks(name, optimizer, parameters, *around, hides=not self._steps_here)

    # -- for the training loop ------------------------------------------------------------------

    @property
    def is_worker(self) -> bool:
        """Whether this rank takes steps; where servers are dedicated, theirs do not."""
        return self.comm.rank in self.workers

    @property
    def staleness_histogram(self) -> dict[int, int]:
        """How often each staleness was met on this rank; see the method for what it counts."""
        return dict(sorted(self._histogram.counts.items()))

    def total_histogram(self) -> dict[int, int]:
        """Return the sum of all ranks' histograms. Collective."""
        total = Counter[int]()
        for counts in self.comm.allgather_object(self.staleness_histogram):
            total.update(counts)
        return dict(sorted(total.items()))

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Say how many samples the next step's loss is the mean of; not collective.

        Gradients of one clock are weighted by ``num_samples / nominal``, until other numbers are
        given; one with 0 samples counts for nothing, whatever it holds. All workers give numbers,
        or none does; else a step raises ``MismatchError``.

        Raises:
            ConfigError: they are not valid.
        """
        check_count(num_samples, nominal)
        self._samples, self._is_counted = (num_samples, nominal), True

    def skip_step(self) -> None:
        """Take a step that counts for nothing, in the place of ``optimizer.step()``."""
        self._require_open()
        self._step([None] * len(self._layout.parameters), weight=0.0)

    @dynamo_disable
    def settle(self, where: str = "settle()") -> None:
        """Give all ranks the values in which every update is. Collective.

        A rank that comes here holds back nobody, and waits for all; ``where`` is for messages.

        Raises:
            MismatchError: another rank has come to another place; on every rank.
            ConfigError: parameters were written to outside of ``step()``, see ``reload``; or the
                block has ended.
        """
        self._require_open()
        self._require_untouched()
        self._settle(where)

    def _settle(self, where: str, *, takes: bool = True) -> None:
        self._before_settle()
        self._clock = self._ask(Settle(where), takes=takes)[0].clock
        self._is_settled = True

    def finish(self, *, ends: bool = False) -> None:
        """Settle, and average buffers such as running means over the workers. Collective."""
        self.settle("the end" if ends else "finish()")
        share = 1.0 / len(self.workers)
        for _, buffer in self.model.named_buffers():
            if buffer.is_floating_point():
                mean = buffer.detach() if self.is_worker else torch.zeros_like(buffer)
                buffer.copy_(self.comm.allreduce(mean.cpu(), scale=share))

    @contextmanager
    def settled(self, *, shows_all: bool = True) -> Iterator[None]:
        """Let model and optimizer state be those of the servers inside, to save them. Collective.

        ``optimizer.state_dict()`` inside is that of a plain optimizer, for any number of ranks;
        with ``shows_all`` it also has what servers keep beside that, for ``Downpour``.
        """
        self.settle("settled()")
        self._gather_state()
        if shows_all:
            self._show_state()
        try:
            yield
        finally:
            self._forget_state()

    def reload(self) -> None:
        """Let servers take over what model and optimizer have now, as after loading. Collective.

        Every rank has loaded both. A method that is made after loading does so by itself.
        """
        self._require_open()
        self._take_state()
        self._settle("reload()", takes=False)
        self._load()
        self.comm.barrier()

    def close(self) -> None:
        """Remove the hooks. Not collective; servers end once all ranks have closed the method."""
        if self._block is None and self._farewell is not None:
            self._farewell()
        elif self._hooks.are_on and not self._is_settled:
            self._send(Settle("close()"))
        self._hooks.remove()

    def _steps_begun(self) -> int:
        return self._clock

    def _begin_block(self) -> None:
        self._require_open()

    def _end_block(self) -> None:
        self.finish(ends=True)
        self._gather_state()
        self._has_ended = True

    def _leave_block(self, error: BaseException | None) -> None:
        self._is_settled |= error is not None  # the others hear of the error
        self.close()
        if self._farewell is not None and self._farewell.detach():
            self._messages.leave(self.servers, Leave(""))

    # -- what methods differ in -----------------------------------------------------------------

    _farewell: Farewell | None = None
    """Lets servers know that this rank sends no more requests; None in a world of one."""
    _states: LastStates | None = None

    _steps_here = False
    """Whether the optimizer takes its step on this rank, too, before servers are asked."""

    def _exchange(self, weight: float, gradients: Sequence[Tensor | None]) -> None:
        """Do what is due in a step, at this clock, and count it."""
        raise NotImplementedError

    def _before_settle(self) -> None:
        """Send what was not sent yet."""

    def _show_state(self) -> None:
        """Let the optimizer have what the one of the servers has, where that is another one."""

    def _take_state(self) -> None:
        """Do the reverse, before servers load."""

    # -- steps ----------------------------------------------------------------------------------

    def _begin_step(self) -> None:
        self._layout.require_same(self.optimizer)
        self._require_untouched()
        if not self._steps_here:
            self._step_by_gradients()

    def _end_step(self) -> None:
        if self._steps_here:
            self._step_by_gradients()

    def _step_by_gradients(self) -> None:
        num_samples, nominal = self._samples
        self._step([p.grad for p in self._layout.parameters], num_samples / nominal)

    def _step(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        if not self.is_worker:
            raise ConfigError(
                f"rank {self.comm.rank} is a dedicated server and takes no steps, workers are "
                f"{self.workers}; write `if method.is_worker:` before the loop, inside the block"
            )
        self.waited_s, self._is_settled = 0.0, False
        self._exchange(weight, gradients)
        self._note_values()

    def _push(self, weight: float, gradients: Sequence[Tensor | None], *, reads: bool) -> int:
        """Send gradients at this clock, which they end; return their staleness."""
        slot = self._clock % self._num_slots
        has = bytes(grad is not None for grad in gradients)
        groups = self.server_optimizer.param_groups
        settings: Settings = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        wrong = first_not_finite(self._names, gradients) if weight else ""
        answers = self._ask(
            Push(self._clock, slot, weight, has, settings, reads, self._is_counted, wrong),
            gradients,
        )
        self._clock += 1
        staleness = max(answer.staleness for answer in answers)
        self._histogram.add(staleness, (float(one["lr"]) for one in settings))
        return staleness

    def _ask(
        self,
        request: Push | Read | Settle,
        gradients: Sequence[Tensor | None] = (),
        *,
        takes: bool = True,
    ) -> list[Answer]:
        """Ask all servers, and take the values in their answers; raise what has failed there."""
        while True:
            try:
                if isinstance(request, Push):
                    self._layout.fill(self._slots.of(self.comm.rank, request.slot), gradients)
                answers = self._answers(request)
                if takes and all(answer.has_values for answer in answers):
                    self._layout.take(self._slots.of(self.comm.rank, VALUES))
                self._note_values()
                if isinstance(request, Settle):
                    self.comm.barrier()  # nobody steps on while others read
            except Exception as error:
                self._go_on(error)
            else:
                return answers

    def _answers(self, request: Push | Read | Settle) -> list[Answer]:
        came: dict[int, Answer] = {}
        values = self._slots.of(self.comm.rank, VALUES)

        def done() -> bool:
            for source, answer, tensors in self._messages.replies.receive():
                came[source] = answer
                self._error = self._error or answer.error
                own = self._layout.parts(values, self.servers.index(source)) if tensors else ()
                for place, tensor in zip(own, tensors, strict=True):
                    place.copy_(tensor)
            return self._error is not None or len(came) == len(self.servers)

        if self._error is None:
            self._send(request)
            self.waited_s += self._messages.wait(done)
        if self._error is not None:
            raise self._error
        return [*came.values()]

    def _send(self, request: Push | Read | Settle) -> None:
        for number, rank in enumerate(self.servers):
            parts: Sequence[Tensor] = ()
            if isinstance(request, Push) and rank not in self._slots:
                whole = self._slots.of(self.comm.rank, request.slot)
                parts = self._layout.parts(whole, number)
            self._messages.requests.send(rank, request, parts)

    # -- servers --------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Make memory and messages. Collective."""
        here, rank = world.current(), self.comm.rank
        mates = next(ranks for ranks in here.topology.nodes if rank in ranks)
        self._slots = Slots(self.comm, self._layout, mates, self._num_slots + 1)
        if self._farewell is not None:
            self._farewell.detach()
        self._messages, self._farewell = connected(self._let_go, self.comm, mates, self.servers)
        if self._farewell is not None:
            self._states = check_over(here.sets.communicator(global_process_set)).last_states
            assert self._states is not None
            self._name = self._states.enter((), self)

    def _let_go(self) -> None:
        """Remove the hooks at the end of the world."""
        self._hooks.remove()
        if self._farewell is not None:
            self._farewell.detach()

    def __del__(self) -> None:
        """Keep what is compared at the end of the world."""
        if self._states is not None:
            self._states.keep(self._name, self)

    def _start_server(self, make_server: Callable[..., ParameterServer]) -> None:
        self._server: ParameterServer | None = None
        if self.comm.rank in self.servers:
            both = self._layout, self._slots
            self._server = make_server(self._messages, *both, self._roles, self.server_optimizer)
        self._load()
        if self._server is not None:
            self._server.start()

    def _go_on(self, error: Exception, before: Mapping[int, int] | None = None) -> None:
        """Go on without lost ranks where the world recovers, and they had no part of the model.

        Collective over those that are left; raises the ``error`` where that cannot be. ``before``
        are numbers of ranks by those that the server knows, where it has not moved since.
        """
        if len(self.servers) == self.comm.size:
            recovery.give_up(error)

        def allows(lost: list[int]) -> bool:
            return not {*self.servers} & {*lost} and not {*self.workers} <= {*lost}

        lost = recovery.survive(error, allows)
        here, left = world.current(), [r for r in range(self.comm.size) if r not in lost]
        now = {rank: number for number, rank in enumerate(left)}
        numbers = now if before is None else {r: now[n] for r, n in before.items() if n in now}
        self._messages.stop()
        self.comm, self._presence = here.comm, here.presence
        self.servers = [now[rank] for rank in self.servers]
        self.workers = [now[rank] for rank in self.workers if rank in now]
        self._roles = Roles(self.comm.rank, self.comm.size, self.servers, self.workers)
        try:
            self._enter_again()
            self._connect()
        except Exception as another:
            self._go_on(another, numbers)  # one more has died meanwhile
            return
        if self._server is not None:
            self._server.move(self._messages, self._slots, self._roles, numbers)

    def _load(self) -> None:
        """Let this rank's server have model and state as they are here, and nobody else."""
        if self._server is not None:
            self._server.load(self.server_optimizer)
        self._forget_state()
        self._note_values()

    def _gather_state(self) -> None:
        """Put the state that the servers have into the optimizer. Collective, after ``settle``."""
        found: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        own = self._server.state() if self._server is not None else []
        for rank in self.servers:
            for number, entries in self.comm.broadcast_object(own, rank):
                for name, value in entries.items():
                    found[number][name].append(value)
        for number, lists in found.items():
            state = {name: self._joined(number, values) for name, values in lists.items()}
            self.server_optimizer.state[self._layout.parameters[number]] = state

    def _joined(self, number: int, values: Sequence[Any]) -> Any:
        """Return an entry of the state of a parameter, of those of its pieces."""
        has_elements = isinstance(values[0], Tensor) and values[0].dim()
        return self._layout.shaped(number, torch.cat([*values])) if has_elements else values[0]

    def _forget_state(self) -> None:
        for p in self._layout.parameters:
            self.server_optimizer.state.pop(p, None)

    # -- checks ---------------------------------------------------------------------------------

    def left(self, _: tuple[int, ...] = (), /, *, has_weights: bool = True) -> dict[str, str]:
        """Return what ranks have that did not settle, and that must be alike; not collective."""
        if self._is_settled or not self.is_compared:
            return {}
        how = f"{type(self).__name__}, whose block has not ended, by `with` or settle(), on all"
        values = zip(self._names, self._layout.parameters, strict=True)
        hashes = value_hashes(dict(values)) if has_weights else {}
        return {f"the number of steps of {how}": str(self._clock)} | {
            f"{one} of {how}": text for one, text in hashes.items()
        }

    def _describe(self, arguments: Mapping[str, object]) -> list[str]:
        lines = [f"{name}={value}" for name, value in arguments.items()]
        every = zip(self._names, self._layout.parameters, self._layout.describe(), strict=True)
        for name, p, about in every:
            state = self.server_optimizer.state.get(p, {})
            step = f" of step {float(state['step']):g}" if "step" in state else ""
            lines.append(f"{name} {about}, state {sorted(state) or None}{step}")
        return [f"optimizer {type(self.optimizer).__qualname__}", *lines]

    def _note_values(self) -> None:
        self._known = self._identities()

    def _identities(self) -> list[tuple[int, int]]:
        return [(p._version, p.data_ptr()) for p in self._layout.parameters]  # noqa: SLF001 - autograd's

    def _require_open(self) -> None:
        if self._has_ended or (self._farewell is not None and not self._farewell.alive):
            raise ConfigError(
                f"the block of {type(self).__name__} has ended, and model and optimizer have all "
                f"that servers had; save and load them as plain ones, or call settle(), "
                f"settled(), finish() and reload() before its end; make another method to go on"
            )

    def _require_untouched(self) -> None:
        """Raise if somebody else has written what the servers would not know of."""
        both = zip(self._names, self._known, self._identities(), strict=True)
        written = [name for name, was, now in both if was != now]
        pairs = zip(self._names, self._layout.parameters, strict=True)
        loaded = [name for name, p in pairs if self.server_optimizer.state.get(p)]
        if found := written or loaded:
            what = "parameters were" if written else "state of the optimizer was"
            raise ConfigError(
                f"values and state lie on the servers, and {what} changed outside of step() "
                f"({', '.join(found[:3])}), which they do not know of; load before "
                f"{type(self).__name__} is made, or call reload() after loading, on every rank"
            )
