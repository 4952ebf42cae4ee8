"""The protocol by which the ranks of a run combine the work of one training step.

One implementation per mechanism: ``AveragedExchange`` (also Adasum), ``ShardedExchange``,
``LocalExchange``, ``AsyncExchange``, ``ReproducibleExchange`` and ``ParallelExchange``. The
training loop calls, for each step::

    begin, raise_flags -> backward -> clip, clip_values -> step, or skip on all ranks that agree
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.checkpoint.format.shard import Shard
from hpctrain.checkpoint.format.state_hash import state_hash
from hpctrain.checkpoint.format.state_tree import mapped
from hpctrain.comm.communicator import Communicator
from hpctrain.comm.norms import clip_grad_norm_, exact_sum, total_norm
from hpctrain.comm.tensor_arguments import on_host
from hpctrain.compress.codec import Codec
from hpctrain.compress.savings import Savings
from hpctrain.core.errors import CheckpointError
from hpctrain.core.python_compat import Self
from hpctrain.data.loader import Loader
from hpctrain.gradients.replica_check import require_equal_replicas
from hpctrain.train.model import BuiltModel, misfits
from hpctrain.train.run_config import RunConfig

Forward = Callable[..., tuple[Tensor, Tensor]]
"""Returns output and mean loss of inputs and labels; see ``Task.forward``."""

Figures = dict[str, Any]
"""Entries of a record of ``metrics.jsonl``, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """This rank's part of the global batch of a step."""

    inputs: Tensor
    labels: Tensor
    num_samples: int  # of this rank; 0 where the last batch of an epoch is too short
    num_global: int  # of all ranks

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels."""
        return self.inputs, self.labels


class LossObserver(Protocol):
    """Receives this rank's loss before gradients are sent."""

    is_first: bool  # whether no step has computed a loss so far

    def see_loss(self, loss: float) -> None:
        """Take the mean loss of this rank's samples."""


class StepExchange:
    """Combines the work of all ranks in each training step.

    The methods of this class hold where all ranks have one model after every step. Mechanisms
    override what is different.

    Args:
        config: of the run.
        comm: all ranks.
        model: of this rank.
        optimizer: of this rank; holds the parameters of ``model``.
        method: the object that communicates in a step, such as a ``DistributedOptimizer``.
    """

    takes_own_steps = False
    """Whether ranks take steps of their own and synchronize at the end of a round."""
    is_reproducible = False  # whether bits of results are independent of the number of ranks
    wants_epoch_loss = False  # whether ``end_epoch`` is called

    def __init__(
        self,
        config: RunConfig,
        comm: Communicator,
        model: nn.Module,
        optimizer: Optimizer,
        method: Any,
    ) -> None:
        self.config, self.comm = config, comm
        self.model, self.optimizer = model, optimizer
        self.method: Any = method  # each implementation annotates its type
        self._peaks = [group["lr"] for group in optimizer.param_groups]

    @classmethod
    def build(cls, config: RunConfig, comm: Communicator, built: BuiltModel) -> Self:
        """Return the exchange of a model that is the same on all ranks. Collective.

        It may replace model and optimizer.

        Raises:
            MismatchError: the method refuses its arguments; on all ranks.
        """
        raise NotImplementedError

    # -- one step -------------------------------------------------------------------------------

    def begin(self, rate: float, *, must_agree: bool) -> None:
        """Set the learning rates of a step to ``rate`` times those of the configuration. Local.

        Where ranks take steps of their own they synchronize after this one if ``must_agree``.
        """
        del must_agree
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * rate

    def raise_flags(self, flags: int) -> None:
        """Send these bits to all ranks with the message of the step. Local."""
        self.method.raise_flags(flags)

    def report_loss(self, loss: float) -> None:
        """Send this rank's loss with the message of the step. Local."""

    def backward(
        self, batch: StepBatch, forward: Forward, observer: LossObserver
    ) -> tuple[float, int]:
        """Compute and combine the gradients of a global batch. Collective.

        Returns:
            The mean loss of some samples, and their number: over all ranks each sample of the
            batch is in one of them. With reproducible steps the loss is that of the whole batch.
        """
        raise NotImplementedError

    @property
    def communication_seconds(self) -> float:
        """Time in which the last step waited for other ranks."""
        return float(self.method.communication_seconds)

    @property
    def raised_flags(self) -> int:
        """Bits that any rank had raised for the last step; the same on every rank."""
        return int(self.method.raised_flags)

    @property
    def gradient_flags(self) -> int:
        """Bits raised by the ranks whose gradients are averaged with those of this rank.

        Known after ``backward``.
        """
        return self.raised_flags

    def mean_loss(self, loss: float) -> float:
        """Return the mean loss of all samples of the step, where this rank's is ``loss``."""
        return loss

    def own_loss(self, loss: float) -> float:
        """Return the part of this rank's samples in ``loss``, which ``backward`` returned."""
        return loss

    @property
    def sums_are_finite(self) -> bool:
        """Whether the combined gradients are known to be finite."""
        return False

    def look_at_sums(self) -> None:
        """Let ``sums_are_finite`` be known from the next step on, if possible."""

    @property
    def is_synchronous(self) -> bool:
        """Whether all ranks take the present step together."""
        return True

    @property
    def leads_step(self) -> bool:
        """Whether this rank is the first of those that take the present step together."""
        return self.comm.rank == 0

    def clip(self, max_norm: float) -> float:
        """Clip the combined gradient; return its norm before. Collective with sharded state."""
        return float(clip_grad_norm_(self.model.parameters(), max_norm))

    def gradient_norm(self) -> float:
        """Return the norm of the combined gradient. Collective with sharded state."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        return float(total_norm(dense)) if dense else 0.0

    def clip_values(self, max_value: float) -> None:
        """Clip each element of the combined gradient. Local."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if parameters:  # torch refuses an empty list: a rank without samples in its own step
            nn.utils.clip_grad_value_(parameters, max_value)

    def step(self) -> None:
        """Update the parameters. Collective where the optimizer is."""
        self.optimizer.step()

    def skip(self, flags: int) -> None:
        """Leave this step out; ``flags`` inform ranks that do not know. Collective."""
        del flags
        self.optimizer.zero_grad()

    def counted(self, loss: float, batch: StepBatch, num_samples: int) -> tuple[float, int]:
        """Return loss and number of samples of this rank in the sums of a record."""
        del batch
        return loss, num_samples

    # -- rounds and epochs ----------------------------------------------------------------------

    @property
    def is_between_rounds(self) -> bool:
        """Whether the ranks have synchronized after the last step."""
        return True

    def resume_clock(self) -> None:
        """Leave the time since the last step out of the measured time of steps. Local."""

    def end_epoch(self, loss: float) -> None:
        """Take the mean training loss of an epoch, the same on every rank."""

    def finish(self) -> None:
        """End the round, so that all ranks have one model. Collective."""

    def averaged(self) -> AbstractContextManager[None]:
        """Give the model the mean of all replicas inside the block. Collective."""
        return nullcontext()

    def settled(self) -> AbstractContextManager[object]:
        """Give model and optimizer the state that is saved inside the block. Collective."""
        return nullcontext()

    def close(self) -> None:
        """Remove the hooks of the method. Local."""

    # -- tests ----------------------------------------------------------------------------------

    def share_buffers(self) -> None:
        """Give all ranks the buffers of rank 0, such as running means. Collective."""
        for buffer in self.model.buffers():
            with on_host(buffer) as values:
                self.comm.broadcast_(values).wait()

    def test_parts(
        self, values: tuple[Tensor, Tensor], loader: Loader
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield inputs and labels that this rank judges together, of its part of a batch.

        The output is included where several ranks compute it together. Collective then.
        """
        del loader
        if len(values[0]):
            yield *values, None
        else:
            self.forward_nothing(values[0])

    def forward_nothing(self, inputs: Tensor, times: int = 1) -> None:
        """Take part in the collectives of the other ranks' forward passes, without samples."""

    def sum_rows(self, rows: Sequence[Sequence[float]], num_columns: int) -> list[float]:
        """Return the sums of the columns over the rows of all ranks. Collective.

        Each rank rounds its sums once, so that the order of its rows does not matter.
        """
        sums = torch.tensor(column_sums(rows, num_columns), dtype=torch.float64)
        self.comm.allreduce_(sums).wait()
        return sums.tolist()

    # -- replicas -------------------------------------------------------------------------------

    @property
    def replicas_agree(self) -> bool:
        """Whether all ranks should have the same parameters now; the same on every rank."""
        return True

    @property
    def states_agree(self) -> bool:
        """Whether all ranks should have the same parameters and optimizer state now."""
        return True

    @property
    def heals(self) -> bool:
        """Whether ranks that differ take the values of the other ranks."""
        return self.config.train.on_divergence == "heal"

    def check_replicas(self) -> bool:
        """Compare the replicas; return whether they should be equal now. Collective.

        Raises:
            ReplicaError: they differ; on every rank.
        """
        if not self.replicas_agree:
            return False
        require_equal_replicas(
            self.comm,
            self.model,
            self.optimizer if self.states_agree else None,
            buffers=self.is_reproducible or None,
            heal=self.heals,
        )
        return True

    def hash(self) -> str:
        """Return a hash of parameters and optimizer state, the same on every rank. Collective."""
        return state_hash(self._parameters_and_optimizer(), self.comm)

    def _parameters_and_optimizer(self) -> dict[str, Any]:
        parameters = dict(self.model.named_parameters())
        return {"model": parameters, "optimizer": self.optimizer.state_dict()}

    # -- layout of the model --------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def layout(self) -> str | None:
        """How ranks divide the model; None where each rank has the whole model."""
        return None

    @property
    def seed_offset(self) -> int:
        """Number that is added to the seed on this rank: dropout must differ between samples."""
        return self.comm.rank

    def share_out(self, *loaders: Loader) -> None:
        """Let the loaders read the samples of this rank's replica. Local."""

    # -- checkpoints ----------------------------------------------------------------------------

    @property
    def codec(self) -> Codec | None:
        """Codec of the gradients; None where they are sent as they are."""
        return None

    def local_state(self) -> dict[str, Any]:
        """Return model and optimizer of this rank, for ``restore_model``.

        Collective where ranks divide the model.
        """
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def shared_state(self) -> dict[str, Any]:
        """Return the state that any number of ranks can continue from. Collective.

        Buffers such as running means differ between ranks: those of rank 0 are saved.
        """
        model, optimizer = self._shared_model(), self._shared_optimizer()
        return {"model": model, "optimizer": optimizer, **self._empty_state()}

    def _empty_state(self) -> dict[str, Any]:
        """Return the entries that mechanisms replace, which readers of a checkpoint expect."""
        return {"layout": self.layout, **dict.fromkeys(("sync", "codec", "steps", "noise"))}

    def _shared_model(self) -> dict[str, Any]:
        model = dict(self.model.state_dict())
        for name, buffer in self.model.named_buffers():
            if name in model:
                copy = buffer.detach().to("cpu", copy=True)
                self.comm.broadcast_(copy).wait()
                model[name] = copy
        return model

    def _shared_optimizer(self) -> dict[str, Any]:
        state: dict[str, Any] = self.optimizer.state_dict()
        return state

    def own_state(self) -> dict[str, Any]:
        """Return the state of this rank alone. Collective."""
        return dict.fromkeys(("replica", "sync", "codec", "noise"))

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Continue from ``shared_state()`` and ``own_state()``. Collective.

        ``own`` is None where the number of ranks has changed.

        Raises:
            CheckpointError: the state does not fit model, optimizer or method.
        """
        try:
            # A run that averages gradients may continue one whose ranks had replicas of their own.
            replica = own.get("replica") if own and self.takes_own_steps else None
            self.restore_model(shared, replica)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"the model and the optimizer must be those of the checkpoint, but {error}; "
                f"continue with the configuration that the checkpoint was written with"
            ) from error

    @torch.no_grad()
    def restore_model(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Load model and optimizer of ``shared``; ``own`` is this rank's replica, if any."""
        check_fit(shared["model"], self.model.state_dict())
        self.model.load_state_dict(shared["model"])
        # Copied: an optimizer keeps the tensors that it is given.
        saved = mapped((own or shared)["optimizer"], Tensor.clone)
        self.optimizer.load_state_dict(saved)
        _restore_scalars(self.optimizer, saved)
        if own:
            for name, parameter in self.model.named_parameters():
                parameter.copy_(own["parameters"][name])

    def wanted(self, latest: Callable[[], Any]) -> Mapping[str, Shard] | None:
        """Return the shards that this rank reads of the newest checkpoint; None for all.

        Args:
            latest: returns the folder of the newest checkpoint, None without one. Collective.
        """
        del latest
        return None

    # -- records and text -----------------------------------------------------------------------

    @property
    def facts(self) -> Figures:
        """Entries of the first record of a run."""
        return {"layout": self.layout} if self.layout else {}

    @property
    def figures(self) -> Figures:
        """Entries of each record of steps; the same on every rank."""
        return {}

    @property
    def noise_scale(self) -> float | None:
        """The gradient noise scale in samples; None where it is not measured. Collective."""
        return None

    @property
    def savings(self) -> Savings | None:
        """Bytes that compression saves; None where gradients are not compressed."""
        return None

    def describe(self) -> list[tuple[str, str]]:
        """Return rows of the description of a run: title and text."""
        return [("layout", self.layout)] if self.layout else []


def column_sums(rows: Sequence[Sequence[float]], num_columns: int) -> list[float]:
    """Return the exact sum of each column, rounded once."""
    columns = zip(*rows, strict=True) if rows else [()] * num_columns
    return [exact_sum(column) for column in columns]


def check_fit(have: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Return if a checkpoint has all tensors of a model, in its shapes and types, and no others.

    Raises:
        CheckpointError: it does not; lists every tensor.
    """
    if lines := misfits(have, want):
        raise CheckpointError(
            f"the checkpoint of this run does not fit the model in {len(lines)} "
            f"tensor{'s' * (len(lines) != 1)}; build the model that was saved, or change its "
            f"state between hpctrain.checkpoint.load and save:\n  " + "\n  ".join(lines)
        )


def _restore_scalars(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Give scalars of an optimizer's state, such as those of NAdam, their saved dtype.

    torch converts them to the dtype of the parameter, which changes their bits.
    """
    places = (place for group in saved["param_groups"] for place in group["params"])
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for place, parameter in zip(places, parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        for name, value in saved["state"].get(place, {}).items():
            is_scalar = isinstance(value, Tensor) and value.dim() == 0 and name in state
            if is_scalar and state[name].dtype != value.dtype:
                state[name] = value.to(state[name].device)
