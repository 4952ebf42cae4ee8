"""Base class of methods whose workers exchange gradients and values with parameter servers."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.parameter_layout import ParameterLayout, WriteWatch
from hpctrain.async_sgd.parameter_shard import ParameterShard
from hpctrain.async_sgd.requirements import Roles, Servers, first_not_finite, require_servable
from hpctrain.async_sgd.server import ParameterServer
from hpctrain.async_sgd.server_client import ServerClient
from hpctrain.async_sgd.server_messages import Push, Read, ServerReply, Settings, Settle
from hpctrain.async_sgd.staleness import StalenessHistogram
from hpctrain.async_sgd.step_hooks import StepHooks
from hpctrain.checkpoint.format.state_hash import value_hashes
from hpctrain.collectives.parameters import broadcast_parameters
from hpctrain.comm.agreement import agreed, require_equal
from hpctrain.comm.common_block import CommonBlock
from hpctrain.comm.communicator import Communicator
from hpctrain.core.checks import Amount, checked, require_open
from hpctrain.core.errors import ConfigError
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.gradients.sample_count import SampleCount
from hpctrain.gradients.step_counter import check_over
from hpctrain.runtime import recovery, world
from hpctrain.runtime.last_check import LastStates
from hpctrain.runtime.process_sets import global_process_set


class _Phase(Enum):
    """Whether the parameters of this rank and of the servers are equal."""

    SETTLED = auto()  # all ranks have the servers' values, which include all updates
    STEPPING = auto()  # this rank has taken steps since the last ``settle``
    ENDED = auto()  # the block has ended; model and optimizer have the servers' values and state


class AsyncMethod(CommonBlock):
    """Makes each step of an optimizer send gradients to servers and receive new values.

    The training loop runs in the block of the method (``with``). Workers may take different
    numbers of steps: at the end of the block a rank waits for the other ranks without delaying
    them, and all ranks then have the same model. If an error ends the block on some ranks, the
    ranks that wait at the end raise an error within seconds.

    Each server is a thread of its rank. The servers store the values of the parameters and the
    optimizer state. A parameter that changes outside of ``step()`` raises an error in the next
    step or at the end of the block, unless ``reload`` sends the new value to the servers; in-place
    writes through ``.data`` are lost. In a world of one rank, the server has no thread and runs
    while the rank waits for replies.

    The constructor is collective: it broadcasts the model of rank 0, starts the servers and hooks
    the optimizer.

    Args:
        model: module with equal parameters and buffers on every rank.
        optimizer: a plain torch optimizer.
        make_server: function that creates a server from messages, slots, roles and a shard.
        servers: ranks that serve, as for ``StaleSynchronous``.
        curvature: curvature of the loss, for a warning; None if it is not known.
        same: other arguments of the method that must be the same on every rank, by name.
    """

    _states: LastStates | None = None
    _server: ParameterServer | None = None

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        make_server: Callable[..., ParameterServer],
        servers: Servers,
        curvature: float | None,
        same: Mapping[str, object],
    ) -> None:
        here, name = world.current(), type(self).__name__
        self.model, self.optimizer, self._presence = model, optimizer, here.presence
        self.is_compared = here.settings.check_weights != "off"
        """Whether ranks that end with different values, without ``settle``, raise an error."""
        with agreed(here.comm, ConfigError):
            require_servable(name, model, optimizer)
            if curvature is not None:
                checked("curvature", curvature, Amount)
            roles = Roles.of(servers, here.comm.rank, here.comm.size)
        self._histogram, self._samples = StalenessHistogram(curvature), SampleCount()
        self._clock, self._phase = 0, _Phase.SETTLED
        names = {id(p): text for text, p in model.named_parameters()}
        self._layout = ParameterLayout(optimizer, names, len(roles.servers))
        self._watch = WriteWatch(self._layout)
        parameters = self._layout.parameters
        self.server_optimizer = self._optimizer_of_servers(parameters)
        """Optimizer that the servers apply; its state is empty while servers store the state."""
        self._take_state()
        require_equal(
            here.comm,
            self._describe({"servers": roles.servers, **same}),
            "optimizer, arguments and parameters",
            "build the same model, optimizer and method on every rank",
        )
        broadcast_parameters(model.state_dict())
        self._client = ServerClient(self._layout, roles, self._num_slots, self._on_world_end)
        self._enter_check()
        if here.comm.rank in roles.servers:
            number = roles.servers.index(here.comm.rank)
            shard = ParameterShard(self._layout, number, self.server_optimizer)
            client = self._client
            self._server = make_server(client.messages, client.slots, roles, shard)
        self._load()
        if self._server is not None:
            self._server.start()
        around = self._begin_step, self._end_step
        self._hooks = StepHooks(name, optimizer, parameters, *around, hides=not self._steps_here)

    # -- for the training loop ------------------------------------------------------------------

    @property
    def comm(self) -> Communicator:
        """Communicator over all ranks."""
        return self._client.comm

    @property
    def servers(self) -> list[int]:
        """Ranks that serve a shard of the parameters."""
        return self._client.roles.servers

    @property
    def workers(self) -> list[int]:
        """Ranks that take steps."""
        return self._client.roles.workers

    @property
    def is_worker(self) -> bool:
        """Whether this rank takes steps; a dedicated server does not."""
        return self.comm.rank in self.workers

    @property
    def waited_s(self) -> float:
        """Seconds for which the last step waited for servers."""
        return self._client.waited_s

    @property
    def staleness_histogram(self) -> dict[int, int]:
        """Counts of this rank by staleness; the subclass documents what is counted."""
        return dict(sorted(self._histogram.counts.items()))

    def total_histogram(self) -> dict[int, int]:
        """Return the staleness histogram summed over all ranks. Collective."""
        total = Counter[int]()
        for counts in self.comm.allgather_object(self.staleness_histogram):
            total.update(counts)
        return dict(sorted(total.items()))

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Set the number of samples in this rank's mean loss, from the next step on. Local.

        The gradients of one step are weighted by ``num_samples / nominal``; a gradient of 0
        samples is ignored, even if it is not finite. All workers call this method, or none does;
        otherwise a step raises ``MismatchError``.

        Raises:
            ConfigError: an argument is not valid, or the block has ended.
        """
        self._require_open()
        self._samples.set(num_samples, nominal)

    def skip_step(self) -> None:
        """Take a step of weight 0 without gradients, instead of ``optimizer.step()``."""
        self._require_open()
        self._step([None] * len(self._layout.parameters), weight=0.0)

    @dynamo_disable
    def settle(self, where: str = "settle()") -> None:
        """Copy the current values, which include all updates, to every rank. Collective.

        A rank in this call waits for all ranks, but does not delay the steps of other ranks.

        Args:
            where: name of this call, for messages; the same on all ranks.

        Raises:
            MismatchError: the ranks settle with different ``where``; on every rank.
            ConfigError: parameters were written outside of ``step()``, see ``reload``; or the
                block has ended.
        """
        self._require_open()
        self._require_untouched()
        self._settle(where)

    def _settle(self, where: str, *, takes: bool = True) -> None:
        self._before_settle()
        self._clock = self._send_and_wait(Settle(where), takes=takes)[0].clock
        self._phase = _Phase.SETTLED

    def finish(self, *, ends: bool = False) -> None:
        """Settle, and average floating-point buffers over the workers. Collective."""
        self.settle("the end" if ends else "finish()")
        share = 1.0 / len(self.workers)
        for _, buffer in self.model.named_buffers():
            if buffer.is_floating_point():
                mean = buffer.detach() if self.is_worker else torch.zeros_like(buffer)
                buffer.copy_(self.comm.allreduce(mean.cpu(), scale=share))

    @contextmanager
    def settled(self, *, shows_all: bool = True) -> Iterator[None]:
        """Settle; inside the block, the optimizer contains the servers' optimizer state.

        Collective. Inside the block, ``optimizer.state_dict()`` has the form of a plain optimizer,
        independent of the number of ranks.

        Args:
            shows_all: whether the optimizer state of ``Downpour`` includes the servers' Adagrad
                state.
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
        """Send the current parameters and optimizer state to the servers. Collective.

        Call this method after all ranks have loaded the same model and optimizer state. It is not
        necessary after the constructor, which also sends both.
        """
        self._require_open()
        self._take_state()
        self._settle("reload()", takes=False)
        self._load()
        self.comm.barrier()

    def close(self) -> None:
        """Remove the hooks. Local; servers end after all ranks have called this method."""
        if self._block is None and self._client.has_peers:
            self._client.send_leave()
        elif self._hooks.are_on and self._phase is _Phase.STEPPING:
            self._client.send(Settle("close()"))
        self._hooks.remove()

    def _steps_begun(self) -> int:
        return self._clock

    def _begin_block(self) -> None:
        self._require_open()

    def _end_block(self) -> None:
        self.finish(ends=True)
        self._gather_state()
        self._phase = _Phase.ENDED

    def _leave_block(self, error: BaseException | None) -> None:
        if error is not None and self._phase is _Phase.STEPPING:
            self._phase = _Phase.SETTLED  # the block reports the error to the other ranks
        self.close()
        self._client.leave_settled()

    # -- for subclasses -------------------------------------------------------------------------

    _num_slots = 1
    """Number of gradients of this rank that may be in flight concurrently."""
    _steps_here = False
    """Whether the optimizer updates this rank's replica before gradients are sent."""

    def _optimizer_of_servers(self, parameters: list[Tensor]) -> Optimizer:
        """Return the optimizer that the servers apply."""
        del parameters
        return self.optimizer

    def _exchange(self, weight: float, gradients: Sequence[Tensor | None]) -> None:
        """Send gradients and receive values as this step requires, and count the step."""
        raise NotImplementedError

    def _before_settle(self) -> None:
        """Send the gradients that this rank has accumulated."""

    def _show_state(self) -> None:
        """Copy the servers' state into ``optimizer`` if the servers apply another optimizer."""

    def _take_state(self) -> None:
        """Undo ``_show_state``: move the servers' state to ``server_optimizer``."""

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
        self._step([p.grad for p in self._layout.parameters], self._samples.weight)

    def _step(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        if not self.is_worker:
            raise ConfigError(
                f"only the workers, ranks {self.workers}, can take steps, but rank "
                f"{self.comm.rank} is a dedicated server; write `if method.is_worker:` before the "
                f"loop, inside the block"
            )
        self._client.waited_s, self._phase = 0.0, _Phase.STEPPING
        self._exchange(weight, gradients)
        self._watch.note()

    def _push(self, weight: float, gradients: Sequence[Tensor | None], *, reads: bool) -> int:
        """Send gradients to all servers, and advance the clock; return the largest staleness."""
        slot = self._clock % self._num_slots
        has = bytes(grad is not None for grad in gradients)
        groups = self.server_optimizer.param_groups
        settings: Settings = [{k: v for k, v in g.items() if k != "params"} for g in groups]
        wrong = first_not_finite(self._layout.names, gradients) if weight else ""
        replies = self._send_and_wait(
            Push(self._clock, slot, weight, has, settings, reads, self._samples.is_set, wrong),
            gradients,
        )
        self._clock += 1
        staleness = max(reply.staleness for reply in replies)
        self._histogram.add(staleness, (float(one["lr"]) for one in settings))
        return staleness

    def _send_and_wait(
        self,
        request: Push | Read | Settle,
        gradients: Sequence[Tensor | None] = (),
        *,
        takes: bool = True,
    ) -> list[ServerReply]:
        """Send a request to all servers, and return the replies; after a recovery, send again."""
        while True:
            try:
                replies = self._client.send_and_wait(request, gradients, takes=takes)
                self._watch.note()
                if isinstance(request, Settle):
                    self.comm.barrier()  # no rank steps while another rank still reads
            except Exception as error:
                self._recover(error)
            else:
                return replies

    def _on_world_end(self) -> None:
        """Remove the hooks, and cancel the last request. Called at the end of the world."""
        self._hooks.remove()
        self._client.cancel_leave()

    def _recover(self, error: Exception, before: Mapping[int, int] | None = None) -> None:
        """Continue without the lost ranks if the world recovers and no lost rank was a server.

        Collective over the surviving ranks.

        Args:
            error: raised again if the world does not recover.
            before: maps ranks of the world before the recovery to current ranks; None unless
                another rank is lost during a recovery.
        """
        if len(self.servers) == self.comm.size:
            recovery.raise_lost(error)

        def allows(lost: list[int]) -> bool:
            return not {*self.servers} & {*lost} and not {*self.workers} <= {*lost}

        lost = recovery.survive(error, allows)
        here, left = world.current(), [r for r in range(self.comm.size) if r not in lost]
        now = {rank: number for number, rank in enumerate(left)}
        numbers = now if before is None else {r: now[n] for r, n in before.items() if n in now}
        client, self._presence = self._client, here.presence
        client.move(now)
        try:
            self._enter_again()
            client.reconnect()
            self._enter_check()
        except Exception as another:  # another rank was lost
            self._recover(another, numbers)
            return
        if self._server is not None:
            self._server.move(client.messages, client.slots, client.roles, numbers)

    # -- state of the optimizer -----------------------------------------------------------------

    def _load(self) -> None:
        """Copy parameters and state to this rank's server, and clear the optimizer's state."""
        if self._server is not None:
            self._server.shard.load(self.server_optimizer)
        self._forget_state()
        self._watch.note()

    def _gather_state(self) -> None:
        """Copy the state of the servers into the optimizer. Collective, after ``settle``."""
        found: dict[int, dict[str, list[Any]]] = defaultdict(lambda: defaultdict(list))
        own = self._server.shard.state() if self._server is not None else []
        for rank in self.servers:
            for number, entries in self.comm.broadcast_object(own, rank):
                for name, value in entries.items():
                    found[number][name].append(value)
        for number, lists in found.items():
            state = {name: self._joined(number, values) for name, values in lists.items()}
            self.server_optimizer.state[self._layout.parameters[number]] = state

    def _joined(self, number: int, values: Sequence[Any]) -> Any:
        """Return a state entry of a parameter; ``values`` are the entries of its ranges."""
        has_elements = isinstance(values[0], Tensor) and values[0].dim()
        return self._layout.shaped(number, torch.cat([*values])) if has_elements else values[0]

    def _forget_state(self) -> None:
        for p in self._layout.parameters:
            self.server_optimizer.state.pop(p, None)

    # -- checks ---------------------------------------------------------------------------------

    def _enter_check(self) -> None:
        """Register this rank for the comparison of values at the end of the world."""
        if self._client.has_peers:
            sets = world.current().sets
            self._states = check_over(sets.communicator(global_process_set)).last_states
            assert self._states is not None
            self._name = self._states.enter((), self._left)

    def __del__(self) -> None:
        """Store the values for the comparison at the end of the world."""
        if self._states is not None:
            self._states.keep(self._name, self._left)

    def _left(self, _: tuple[int, ...], /, *, has_weights: bool = True) -> dict[str, str]:
        """Return texts, by name, that ranks compare; empty if the ranks have settled. Local."""
        if self._phase is not _Phase.STEPPING or not self.is_compared:
            return {}
        how = f"{type(self).__name__}, whose block has not ended, by `with` or settle(), on all"
        values = zip(self._layout.names, self._layout.parameters, strict=True)
        hashes = value_hashes(dict(values)) if has_weights else {}
        return {f"the number of steps of {how}": str(self._clock)} | {
            f"{one} of {how}": text for one, text in hashes.items()
        }

    def _describe(self, arguments: Mapping[str, object]) -> list[str]:
        lines = [f"{name}={value}" for name, value in arguments.items()]
        every = zip(self._layout.parameters, self._layout.describe(), strict=True)
        for p, about in every:
            state = self.server_optimizer.state.get(p, {})
            step = f" of step {float(state['step']):g}" if "step" in state else ""
            lines.append(f"{about}, state {sorted(state) or None}{step}")
        return [f"optimizer {type(self.optimizer).__qualname__}", *lines]

    def _require_open(self) -> None:
        is_on = self._hooks.are_on and self._client.is_open
        require_open(
            is_on and self._phase is not _Phase.ENDED,
            type(self).__name__,
            ConfigError,
            "save and load model and optimizer as plain ones, since both now have the values and "
            "state of the servers, or create a new one to continue",
        )

    def _require_untouched(self) -> None:
        """Raise ``ConfigError`` if parameters or state were written outside of a step."""
        written = self._watch.written()
        pairs = zip(self._layout.names, self._layout.parameters, strict=True)
        loaded = [name for name, p in pairs if self.server_optimizer.state.get(p)]
        if found := written or loaded:
            what = "parameters were" if written else "state of the optimizer was"
            raise ConfigError(
                f"parameters and optimizer state must change in step() only, since servers store "
                f"them, but {what} changed outside of step() ({', '.join(found[:3])}); load them "
                f"before {type(self).__name__} is made, or call reload() after loading, on every "
                f"rank"
            )
