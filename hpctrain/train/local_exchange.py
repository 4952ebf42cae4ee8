"""Combination of steps by local methods: ranks take separate steps and average their replicas."""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from inspect import signature
from typing import Any

from torch import Tensor

from hpctrain.checkpoint.format.state_hash import state_hash
from hpctrain.checkpoint.format.state_tree import mapped
from hpctrain.comm.agreement import agreed
from hpctrain.comm.communicator import Communicator
from hpctrain.compress.by_name import codec_named
from hpctrain.core.checks import Finite0, checked
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.core.target import check_arguments
from hpctrain.local_sgd.diloco import DiLoCo
from hpctrain.local_sgd.local_method import LocalMethod
from hpctrain.local_sgd.local_sgd import HierarchicalLocalSGD, LocalSGD, PostLocalSGD
from hpctrain.local_sgd.staged_sgd import StagedSGD
from hpctrain.train.averaged_exchange import AccumulatedExchange
from hpctrain.train.model import BuiltModel
from hpctrain.train.run_config import RunConfig
from hpctrain.train.step_exchange import Figures
from hpctrain.train.sync_config import SYNCHRONOUS, SyncConfig

WITHIN_S = 1.0
"""Longest time between synchronizations, so that stop requests reach all ranks soon."""


class OwnStepsExchange(AccumulatedExchange):
    """Base class for local and asynchronous methods, in which each rank takes separate steps."""

    takes_own_steps = True

    @property
    def gradient_flags(self) -> int:
        """Flags of the ranks whose gradients this rank averages."""
        return int(self.method.gradient_flags)

    def skip(self, flags: int) -> None:
        """Skip this rank's local step; send ``flags`` at the next synchronization."""
        self.raise_flags(flags)
        self.method.skip_step()
        super().skip(flags)

    def finish(self) -> None:
        """Synchronize the models of all ranks. Collective."""
        self.method.finish()

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the mean of all replicas. Collective."""
        found: AbstractContextManager[None] = self.method.averaged()
        return found

    def close(self) -> None:
        """Remove the hooks of the method. Local."""
        self.method.close()

    def hash(self) -> str:
        """Return a hash of the replicas of all ranks. Collective."""
        mine = state_hash(self._parameters_and_optimizer())
        return state_hash({"ranks": self.comm.allgather_object(mine)})

    def shared_state(self) -> dict[str, Any]:
        """Return the state from which any number of ranks can continue. Collective."""
        method = {"method": self.config.sync.method, **self._method_shared_state()}
        return {**super().shared_state(), "sync": method}

    def own_state(self) -> dict[str, Any]:
        """Return this rank's state of the method and, if replicas differ, this rank's replica."""
        replica = None
        if not self.states_agree:
            parameters = {name: p.detach() for name, p in self.model.named_parameters()}
            replica = {"parameters": parameters, "optimizer": self.optimizer.state_dict()}
        return {**super().own_state(), "replica": replica, "sync": self._method_own_state()}

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Continue from a saved state; start a new round if ``own`` is None. Collective."""
        super().restore(shared, own)
        state, method = shared.get("sync") or {}, self.config.sync.method
        if (before := state.get("method", SYNCHRONOUS)) != method:
            raise CheckpointError(
                f"sync.method must be {before!r}, as in the checkpoint, but it is {method!r}; "
                f"set it back, or start a new run"
            )
        try:
            self._restore_method(state, own and own.get("sync"))
        except (KeyError, ValueError) as error:
            raise CheckpointError(
                f"[sync] must match the checkpoint, but {error!r}; continue with the "
                f"configuration that the checkpoint was written with"
            ) from error

    def _method_shared_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _method_own_state(self) -> dict[str, Any]:
        raise NotImplementedError

    def _restore_method(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        raise NotImplementedError


_KINDS: Mapping[str, type[LocalMethod]] = {
    "local_sgd": LocalSGD,
    "post_local_sgd": PostLocalSGD,
    "hierarchical_local_sgd": HierarchicalLocalSGD,
    "diloco": DiLoCo,
    "staged_sgd": StagedSGD,
}


class LocalExchange(OwnStepsExchange):
    """Averages replicas at the end of each round of steps, with a method such as local SGD.

    Args:
        config: configuration of the run.
        comm: all ranks.
        built: model of this rank, and a plain optimizer, on which the method registers hooks.
    """

    method: LocalMethod

    def __init__(self, config: RunConfig, comm: Communicator, built: BuiltModel) -> None:
        with agreed(comm):
            method = _make_method(config, built)
        super().__init__(config, comm, built, built.optimizer, method)
        self.wants_epoch_loss = isinstance(method, StagedSGD)

    def begin(self, rate: float, *, must_agree: bool) -> None:
        """Set the learning rates; if ``must_agree``, synchronize after the step. Local."""
        super().begin(rate, must_agree=must_agree)
        self.method.clock.must_synchronize = must_agree

    @property
    def takes_part(self) -> bool:
        """Whether this rank trains in the current round; see ``sync.fraction``."""
        return self.method.takes_part

    @property
    def is_synchronous(self) -> bool:
        """Whether all ranks take the current step together."""
        return self.method.is_synchronous

    @property
    def leads_step(self) -> bool:
        """Whether this rank is the lowest of the ranks that take this step together."""
        return self.method.leads_step

    @property
    def is_between_rounds(self) -> bool:
        """Whether the last step ended a round."""
        return self.method.rounds.step_in_round == 0

    def resume_clock(self) -> None:
        """Exclude the time since the last step from measured step times. Local."""
        self.method.clock.resume()

    def end_epoch(self, loss: float) -> None:
        """Pass the mean training loss of an epoch to ``StagedSGD``; no-op for other methods."""
        if isinstance(self.method, StagedSGD):
            self.method.observe(loss)

    @property
    def replicas_agree(self) -> bool:
        """Whether all ranks must have identical parameters now."""
        return self.method.rounds.agrees

    @property
    def states_agree(self) -> bool:
        """Whether all ranks must have identical parameters and optimizer state now."""
        is_synchronous = self.method.facts.get("phase") == SYNCHRONOUS
        return self.comm.size == 1 or (self.replicas_agree and is_synchronous)

    def _shared_model(self) -> dict[str, Any]:
        if self.comm.size == 1 or self.replicas_agree:
            return super()._shared_model()
        with self.method.replica.as_mean(self.method.rounds.share()):
            found: dict[str, Any] = mapped(super()._shared_model(), Tensor.clone)
        return found

    def _shared_optimizer(self) -> dict[str, Any]:
        """Return the mean of the optimizer states of all ranks. Collective.

        The state is empty if ranks have optimizer state for different parameters, for example
        after a reset, or because a rank has had no samples yet.
        """
        state, replica = super()._shared_optimizer(), self.method.replica
        if self.states_agree:
            return state
        names = state_hash({"names": [name for name, _ in replica.state()]})
        if len(set(self.comm.allgather_object(names))) > 1:
            return {**state, "state": {}}
        return replica.mean_state(self.method.rounds.share())

    def _method_shared_state(self) -> dict[str, Any]:
        return self.method.shared_state()

    def _method_own_state(self) -> dict[str, Any]:
        return self.method.own_state()

    def _restore_method(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        self.method.load_shared_state(shared)
        if own is not None:
            self.method.load_own_state(own)

    @property
    def facts(self) -> Figures:
        """Entries for the record that each start or resume of a run writes."""
        sync = self.config.sync
        entries = {"steps": sync.steps, "compression": sync.compression}
        return {"sync": {"method": sync.method, **entries}}

    @property
    def figures(self) -> Figures:
        """Entries about rounds for each step record."""
        facts = self.method.facts
        return {
            "rounds": facts["rounds"],
            "sync_steps": facts["steps"],
            "drift": facts["drift"],
            "bytes_sent": facts["bytes_sent"],
            "bytes_saved": facts["bytes_saved"],
            **({"sync_phase": facts["phase"]} if "phase" in facts else {}),
        }

    def describe(self) -> list[tuple[str, str]]:
        """Return a row ``(title, text)`` about the method."""
        sync = self.config.sync
        auto = sync.steps == "auto"
        text = f"{sync.method}, {'rounds of a measured length' if auto else f'steps {sync.steps}'}"
        if sync.fraction != 1:
            text += f", {sync.fraction:g} of the ranks in each round"
        if sync.proximal:
            text += f", proximal {sync.proximal:g}"
        if sync.compression != "none":
            text += f", compressed by {sync.compression}"
        return [("sync", text)]


@contextmanager
def naming(method: str) -> Iterator[None]:
    """Convert errors inside the block into a ``ConfigError`` that names ``method``."""
    try:
        yield
    except (TypeError, ValueError) as error:  # a ConfigError is a ValueError
        raise ConfigError(f"[sync] must be valid, but {method} refuses: {error}") from error


def _make_method(config: RunConfig, built: BuiltModel) -> LocalMethod:
    sync, epoch_steps = config.sync, built.epoch_steps
    kind = _KINDS[sync.method]
    args = {
        "steps": sync.steps,
        "compression": codec_named(
            sync.compression, sync.compression_args, "sync.compression_args"
        ),
        **_in_steps(sync, epoch_steps, epoch_steps * config.train.epochs),
    }
    if sync.fraction != 1 or sync.proximal:
        drawn = {"fraction": sync.fraction, "proximal": sync.proximal, "seed": config.seed}
        args = {**drawn, **args}
    _check(kind, args)
    with naming(sync.method):
        made = kind(built.model, built.optimizer, **args)
    made.clock.within_s = WITHIN_S
    return made


def _check(kind: type[LocalMethod], args: Mapping[str, Any]) -> None:
    """Raise ``ConfigError`` for an argument that neither the method nor ``LocalSGD`` accepts."""
    if kind is not LocalSGD and issubclass(kind, LocalSGD):
        own = signature(kind).parameters
        args = {name: value for name, value in args.items() if name not in own}
        kind = LocalSGD
    check_arguments(kind, 2, args, "sync.args")


def _in_steps(config: SyncConfig, epoch_steps: int, num_steps: int) -> dict[str, Any]:
    """Return the arguments of a method, with epochs converted to steps."""
    args = dict(config.args)
    if config.method == "post_local_sgd":
        start = _taken(args, "start_epochs", "start", epoch_steps)
        args |= {} if start is None else {"start": start}
    elif config.method == "staged_sgd":
        warmup = _taken(args, "warmup_epochs", "warmup_steps", epoch_steps)
        cooldown = _taken(args, "cooldown_epochs", "cooldown_start", epoch_steps)
        tenth = num_steps // 10
        args.setdefault("warmup_steps", tenth if warmup is None else warmup)
        args.setdefault("cooldown_start", num_steps - (tenth if cooldown is None else cooldown))
    return args


def _taken(args: dict[str, Any], name: str, other: str, epoch_steps: int) -> int | None:
    """Remove ``args[name]``, a number of epochs; return it as steps, or None if not set.

    ``other`` is the argument with the same meaning in steps; setting both is a ``ConfigError``.
    """
    epochs = args.pop(name, None)
    if epochs is None:
        return None
    if other in args:
        raise ConfigError(
            f"sync.args must have either {name} or {other}, but has {name}={epochs!r} and "
            f"{other}={args[other]!r}; leave one out"
        )
    return round(float(checked(f"sync.args.{name}", epochs, Finite0)) * epoch_steps)
