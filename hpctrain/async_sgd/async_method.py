"""The base of methods whose workers go by the values of parameter servers."""

import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.client import ParameterClient
from hpctrain.async_sgd.layout import Buffers, ParameterLayout
from hpctrain.async_sgd.requirements import (
    Servers,
    claim,
    dedicated_servers,
    release,
    require_model,
    require_positive,
    require_servable,
    require_unclaimed,
)
from hpctrain.async_sgd.server import Answer, ParameterServer, Push, Settings, Settle
from hpctrain.async_sgd.staleness import StalenessHistogram
from hpctrain.collectives.parameters import broadcast_parameters
from hpctrain.comm.agreement import agreed, require_equal
from hpctrain.comm.common_block import CommonBlock
from hpctrain.comm.eager import eager
from hpctrain.core.errors import ConfigError
from hpctrain.gradients.optimizer import METHOD_MARK, require_plain
from hpctrain.gradients.sample_count import check_count
from hpctrain.runtime import world
from hpctrain.runtime.rebuild import Stage

_LOG = logging.getLogger(__name__)


class AsyncMethod(CommonBlock):
    """Hooks a plain optimizer: a step sends the gradient to the servers and takes their values.

    The training loop stays as it is, but for ``with``. Workers may take different numbers of
    steps: one that leaves the block holds back nobody, and waits there for the others, so that
    all ranks have one model behind it. Where an error leads a rank out of the block, those that
    wait in it raise within seconds.

    Values and optimizer state of the parameters lie on the servers, each of which is a thread
    beside the training on its rank. Parameters that change outside of ``step()`` are an error at
    the next one, or at the end, unless ``reload`` gives them to the servers; but what is written
    in place through ``.data`` is lost. In a world of one all this is the plain loop.
    """

    def __init__(  # noqa: PLR0913 - what methods differ in
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        servers: Servers,
        curvature: float | None,
        alike: Mapping[str, object],
        num_slots: int = 1,
        server_optimizer: Optimizer | None = None,
    ) -> None:
        """Give all ranks the model of rank 0, start the servers and hook the optimizer.

        Collective. ``alike`` are arguments that are the same on every rank, by name;
        ``num_slots`` gradients of a worker are under way at once; servers step as
        ``server_optimizer``, where that is another one.
        """
        here = world.current()
        self.model, self.optimizer = model, optimizer
        self.server_optimizer = server_optimizer or optimizer
        """Whose step servers take, and where its state is while it is here."""
        self.comm, self._presence = here.comm, here.presence
        with agreed(self.comm, ConfigError):
            self._check()
            if curvature is not None:
                require_positive("curvature", curvature)
            dedicated = dedicated_servers(servers, self.comm.size)
        self.servers = dedicated or [*range(self.comm.size)]
        """Ranks that have a part of the parameters."""
        self.workers = [r for r in range(self.comm.size) if r not in dedicated]
        """Ranks that take steps."""
        self.waited_s = 0.0  # seconds in which the last step waited for servers
        self._histogram = StalenessHistogram(curvature)
        self._samples, self._is_counted = (1.0, 1.0), False
        self._clock, self._num_slots = 0, num_slots
        self._kept: list[Tensor | None] = []
        self._ending = _Ending(type(self).__name__)
        self._known: list[tuple[int, int]] = []  # what parameters were when servers gave them
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._client: ParameterClient | None = None
        self._layout = ParameterLayout(optimizer, len(self.servers))
        self._take_state()
        require_equal(
            self.comm,
            self._describe({"servers": self.servers, **alike}),
            "optimizer, arguments and parameters",
            "build the same model, optimizer and method on every rank",
        )
        broadcast_parameters(model.state_dict())
        if self.comm.size > 1:
            self._connect()
        self._hooks = [
            optimizer.register_step_pre_hook(self._on_step),
            optimizer.register_step_post_hook(lambda *_: self._after_step()),
        ]
        setattr(optimizer, METHOD_MARK, type(self).__name__)
        claim(type(self).__name__, self._layout.parameters)

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
        or none does: one that gives none counts as ``nominal`` samples.

        Raises:
            ConfigError: they are not valid.
        """
        check_count(num_samples, nominal)
        self._samples = (num_samples, nominal)
        self._is_counted = True

    def skip_step(self) -> None:
        """Take a step that counts for nothing, in the place of ``optimizer.step()``."""
        self._step([None] * len(self._layout.parameters), weight=0.0)

    @eager
    def settle(self, where: str = "settle()") -> None:
        """Give all ranks the values in which every update is. Collective.

        A rank that comes here holds back nobody, and waits for all; ``where`` is for messages.

        Raises:
            MismatchError: another rank has come to another place; on every rank.
            ConfigError: parameters were written to outside of ``step()``; see ``reload``.
        """
        if self._client is not None:
            self._require_untouched()
            self._settle(where)

    def _settle(self, where: str) -> None:
        assert self._client is not None
        self._before_settle()
        answers = self._client.ask(Settle(where))
        self._clock = answers[0].clock
        self._ending.is_settled = True
        self._note_values()
        self.comm.barrier()  # nobody steps on while others read

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
            if self._client is not None:
                self._forget_state()

    def reload(self) -> None:
        """Let servers take over what model and optimizer have now, as after loading. Collective.

        Every rank has loaded both. A method that is made after loading does so by itself.
        """
        if self._client is None:
            return
        self._take_state()
        before = [p.detach().clone() for p in self._layout.parameters]
        state = dict(self.server_optimizer.state)
        self._settle("reload()")
        with torch.no_grad():
            for p, value in zip(self._layout.parameters, before, strict=True):
                p.copy_(value)
        self.server_optimizer.state.update(state)
        self._note_values()
        if self._client.own is not None:
            self._client.own.load(self.server_optimizer)
        self._on_load()
        self._forget_state()
        self.comm.barrier()

    def close(self) -> None:
        """Remove the hooks. Not collective; the servers end with the world."""
        if self._hooks:
            delattr(self.optimizer, METHOD_MARK)
            release(self._layout.parameters)
            if self._client is not None and not self._ending.is_settled:
                self._client.leave()
        while self._hooks:
            self._hooks.pop().remove()

    def _steps_begun(self) -> int:
        return self._clock

    def _end_block(self) -> None:
        self.finish(ends=True)
        self._gather_state()

    def _leave_block(self, error: BaseException | None) -> None:
        self._ending.is_settled |= error is not None  # the others hear of the error
        self.close()

    # -- what methods differ in -----------------------------------------------------------------

    _steps_here = False
    """Whether the optimizer takes its step on this rank, too, before servers are asked."""

    def _make_server(self, *args: Any, **options: Any) -> ParameterServer:
        raise NotImplementedError

    def _exchange(self, weight: float, gradients: Sequence[Tensor | None]) -> None:
        """Do what is due in a step, at this clock, and count it."""
        raise NotImplementedError

    def _before_settle(self) -> None:
        """Send what was not sent yet."""

    def _show_state(self) -> None:
        """Let the optimizer have what the one of the servers has, where that is another one."""

    def _take_state(self) -> None:
        """Do the reverse, before servers load."""

    def _on_load(self) -> None:
        """Do what is due once this rank's server has loaded a state."""

    # -- steps ----------------------------------------------------------------------------------

    @eager
    def _on_step(self, optimizer: Optimizer, args: Sequence[Any], kwargs: Any) -> None:
        require_plain(type(self).__name__, self.optimizer)
        if kwargs.get("closure") or len(args) > 1:
            raise ConfigError(
                f"{type(self).__name__} sends the gradients that there are before step(), and "
                f"takes no closure; call backward() before step()"
            )
        if self._client is None:
            return
        self._layout.require_same(optimizer)
        self._require_untouched()
        if not self._steps_here:
            self._kept = self._step_by_gradients()
            for p in self._layout.parameters:  # an optimizer without gradients does nothing
                p.grad = None

    @eager
    def _after_step(self) -> None:
        if self._steps_here and self._client is not None:
            self._step_by_gradients()
        for p, grad in zip(self._layout.parameters, self._kept, strict=bool(self._kept)):
            p.grad = grad
        self._kept = []

    def _step_by_gradients(self) -> list[Tensor | None]:
        found = [p.grad for p in self._layout.parameters]
        num_samples, nominal = self._samples
        self._step(found, num_samples / nominal)
        return found

    def _step(self, gradients: Sequence[Tensor | None], weight: float) -> None:
        if self._client is None:
            return
        if not self.is_worker:
            raise ConfigError(
                f"rank {self.comm.rank} is a dedicated server and takes no steps, workers are "
                f"{self.workers}; write `if method.is_worker:` before the loop, inside the block"
            )
        before = self._client.waited_s
        self._ending.is_settled = False
        self._exchange(weight, gradients)
        self._note_values()
        self.waited_s = self._client.waited_s - before

    def _push(self, weight: float, gradients: Sequence[Tensor | None], *, reads: bool) -> int:
        """Send gradients at this clock, which they end; return their staleness."""
        assert self._client is not None
        slot = self._clock % self._num_slots
        self._layout.fill(self._buffers.gradient(slot), gradients)
        has = bytes(grad is not None for grad in gradients)
        answers = self._client.push(
            Push(
                self._clock,
                slot,
                weight,
                has,
                self._settings(),
                reads=reads,
                is_counted=self._is_counted,
            )
        )
        self._clock += 1
        return self._count(answers)

    def _count(self, answers: Sequence[Answer]) -> int:
        staleness = max(answer.staleness for answer in answers)
        self._histogram.add(staleness, (float(one["lr"]) for one in self._settings()))
        return staleness

    def _settings(self) -> Settings:
        groups = self.server_optimizer.param_groups
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]

    # -- servers --------------------------------------------------------------------------------

    def _connect(self) -> None:
        """Make memory and messages, and start this rank's server. Collective."""
        from hpctrain.comm.direct_messages import DirectMessages  # noqa: PLC0415 - needs MPI

        here, rank = world.current(), self.comm.rank
        assert here.ranks is not None
        nodes = here.topology.nodes
        mates = next(ranks for ranks in nodes if rank in ranks)
        num_copies = max(map(len, nodes))
        self._buffers = Buffers(self.comm, self._layout, mates, self._num_slots, num_copies)
        messages = DirectMessages(here.ranks, self._look, here.settings.timeout)
        own = None
        if rank in self.servers:
            own = self._make_server(
                messages,
                self._layout,
                self._buffers,
                rank=rank,
                number=self.servers.index(rank),
                num_ranks=self.comm.size,
                workers=self.workers,
                optimizer=self.server_optimizer,
            )
            own.load(self.server_optimizer)
            own.start()
        self._client = ParameterClient(messages, self._layout, self._buffers, self.servers, own)
        self._forget_state()
        self._note_values()

        ending, parameters = self._ending, self._layout.parameters

        def close() -> None:
            ending.warn()
            release(parameters)
            if own is not None:
                own.stop()
            messages.close()

        here.rebuild.register(Stage.HOLDERS, close=close)

    def _look(self) -> None:
        if self._presence is not None:
            self._presence.check()

    def _gather_state(self) -> None:
        """Put the state that the servers have into the optimizer. Collective, after ``settle``."""
        if self._client is None:
            return
        own = self._client.own.state() if self._client.own is not None else []
        state: dict[Tensor, dict[str, Any]] = {}
        for rank in self.servers:
            of_server = self.comm.broadcast_object(own if rank == self.comm.rank else None, rank)
            for piece, entries in of_server or ():
                p = self._layout.parameters[piece.number]
                numel = piece.inside.stop - piece.inside.start
                for name, value in entries.items():
                    if not isinstance(value, Tensor) or value.numel() != numel or not value.dim():
                        state.setdefault(p, {}).setdefault(name, value)
                        continue
                    whole = state.setdefault(p, {}).setdefault(
                        name, torch.zeros(p.numel(), dtype=value.dtype)
                    )
                    whole[piece.inside] = value
        for p, entries in state.items():
            self.server_optimizer.state[p] = {
                name: value.view(p.shape).to(p.device)
                if isinstance(value, Tensor) and value.dim()
                else value
                for name, value in entries.items()
            }

    def _forget_state(self) -> None:
        for p in self._layout.parameters:
            self.server_optimizer.state.pop(p, None)

    # -- checks ---------------------------------------------------------------------------------

    def _check(self) -> None:
        name = type(self).__name__
        require_model(self.model, self.optimizer)
        require_plain(name, self.optimizer)
        require_unclaimed(name, self.optimizer)
        require_servable(name, self.model, self.optimizer)

    def _describe(self, arguments: Mapping[str, object]) -> list[str]:
        """Return what all ranks must have alike, a line for each thing."""
        lines = [f"{name}={value}" for name, value in arguments.items()]
        for p, about in zip(self._layout.parameters, self._layout.describe(), strict=True):
            state = self.server_optimizer.state.get(p, {})
            step = f" of step {float(state['step']):g}" if "step" in state else ""
            lines.append(f"{self._names[id(p)]} {about}, state {sorted(state) or None}{step}")
        return [f"optimizer {type(self.optimizer).__qualname__}", *lines]

    def _note_values(self) -> None:
        self._known = self._identities()

    def _identities(self) -> list[tuple[int, int]]:
        return [(p._version, p.data_ptr()) for p in self._layout.parameters]  # noqa: SLF001 - autograd's

    def _require_untouched(self) -> None:
        """Raise if somebody else has written what the servers would not know of."""
        state = self.server_optimizer.state
        both = zip(self._layout.parameters, self._known, self._identities(), strict=True)
        written = [self._names[id(p)] for p, was, now in both if was != now]
        loaded = [self._names[id(p)] for p in self._layout.parameters if state.get(p)]
        if found := written or loaded:
            what = "parameters were" if written else "state of the optimizer was"
            raise ConfigError(
                f"values and state lie on the servers, and {what} changed outside of step() "
                f"({', '.join(found[:3])}), which they do not know of; load before "
                f"{type(self).__name__} is made, or call reload() after loading, on every rank"
            )


class _Ending:
    """Whether a method was settled: warns at the end of the world where it was not."""

    is_settled = True

    def __init__(self, name: str) -> None:
        self._name = name

    def warn(self) -> None:
        if not self.is_settled:
            _LOG.warning(
                "%s was not settled: ranks have different values at the end; use `with`, or call "
                "settle() on all ranks behind the last step",
                self._name,
            )
