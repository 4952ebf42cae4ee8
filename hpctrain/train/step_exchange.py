"""Interface of the mechanisms by which ranks combine gradients or steps.

One implementation per mechanism: ``AveragedExchange``, ``ShardedExchange``, ``LocalExchange``,
``AsyncExchange``, ``ReproducibleExchange`` and ``ParallelExchange``. The training loop calls, for
each step::

    begin, raise_flags -> backward -> clip, clip_values -> step or skip

The step header is a small message that combines the flags and losses of all ranks before their
gradients are summed. With a local method, ranks take local steps, each with its own gradients, and
synchronize at the end of a round of several steps.
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
from hpctrain.compress.codec import Codec, Savings
from hpctrain.core.errors import CheckpointError
from hpctrain.data.loader import Loader
from hpctrain.gradients.replica_check import require_equal_replicas
from hpctrain.train.model import misfits
from hpctrain.train.run_config import RunConfig

Forward = Callable[..., tuple[Tensor, Tensor]]
"""Maps inputs and labels to the output of the model and the mean loss; see ``Task.forward``."""

Figures = dict[str, Any]
"""Entries of a record in ``metrics.jsonl``, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StepBatch:
    """Samples of this rank in one global batch."""

    inputs: Tensor
    labels: Tensor
    num_samples: int  # samples of this rank; may be 0 in the last batch of an epoch
    num_global: int  # samples of all ranks

    @property
    def tensors(self) -> tuple[Tensor, Tensor]:
        """``(inputs, labels)``."""
        return self.inputs, self.labels


class LossObserver(Protocol):
    """Interface of objects that receive this rank's loss before gradients are sent."""

    is_first: bool  # whether no step has computed a loss so far

    def see_loss(self, loss: float) -> None:
        """Receive the mean loss of this rank's samples."""


class StepExchange:
    """Base class of the mechanisms that combine the gradients or steps of all ranks.

    The default methods suit mechanisms whose ranks have identical models after every step.

    Args:
        config: configuration of the run.
        comm: all ranks.
        model: model of this rank.
        optimizer: optimizer of this rank; holds the parameters of ``model``.
        method: object that communicates in each step, such as a ``DistributedOptimizer``.
    """

    takes_own_steps = False
    """Whether ranks take local steps and synchronize only at the end of a round."""
    is_reproducible = False  # whether results are bitwise identical on any number of ranks
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

    # -- one step -------------------------------------------------------------------------------

    def begin(self, rate: float, *, must_agree: bool) -> None:
        """Start a step. Local.

        Args:
            rate: factor of the configured learning rates.
            must_agree: whether ranks with local steps must synchronize after this step.
        """
        del must_agree
        for group, peak in zip(self.optimizer.param_groups, self._peaks, strict=True):
            group["lr"] = peak * rate

    def raise_flags(self, flags: int) -> None:
        """Send these bits to all ranks in the message of this step. Local."""
        self.method.raise_flags(flags)

    def report_loss(self, loss: float) -> None:
        """Add this rank's loss to the step header. Local."""

    def backward(
        self, batch: StepBatch, forward: Forward, observer: LossObserver
    ) -> tuple[float, int]:
        """Compute and combine the gradients of a global batch. Collective.

        Returns:
            A mean loss, and the number of samples in this mean. Each sample of the batch counts on
            exactly one rank. With reproducible steps the loss is the mean over the whole batch.
        """
        raise NotImplementedError

    @property
    def communication_seconds(self) -> float:
        """Seconds that the last step waited for communication."""
        return float(self.method.communication_seconds)

    @property
    def raised_flags(self) -> int:
        """Flags that any rank raised for the last step; identical on all ranks."""
        return int(self.method.raised_flags)

    @property
    def gradient_flags(self) -> int:
        """Flags of the ranks whose gradients this rank averages; valid after ``backward``."""
        return self.raised_flags

    def mean_loss(self, loss: float) -> float:
        """Return the mean loss of all samples of the step; ``loss`` is this rank's mean loss."""
        return loss

    def own_loss(self, loss: float) -> float:
        """Return the mean loss of this rank's samples; ``loss`` is the result of ``backward``."""
        return loss

    @property
    def sums_are_finite(self) -> bool:
        """Whether the combined gradients are known to be finite."""
        return False

    def look_at_sums(self) -> None:
        """From the next step on, compute ``sums_are_finite`` if the mechanism can do so. Local."""

    @property
    def is_synchronous(self) -> bool:
        """Whether all ranks take the current step together."""
        return True

    @property
    def leads_step(self) -> bool:
        """Whether this rank is the lowest of the ranks that take this step together."""
        return self.comm.rank == 0

    def clip(self, max_norm: float) -> float:
        """Clip the combined gradient by norm; return the norm before clipping.

        Collective with sharded state.
        """
        return float(clip_grad_norm_(self.model.parameters(), max_norm))

    def gradient_norm(self) -> float:
        """Return the L2 norm of the combined gradient. Collective with sharded state."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        dense = [g.coalesce().values() if g.is_sparse else g for g in gradients]
        return float(total_norm(dense)) if dense else 0.0

    def clip_values(self, max_value: float) -> None:
        """Clip each element of the combined gradient. Local."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if parameters:  # torch raises for the empty list of a rank without samples
            nn.utils.clip_grad_value_(parameters, max_value)

    def step(self) -> None:
        """Update the parameters. Collective if the optimizer communicates."""
        self.optimizer.step()

    def skip(self, flags: int) -> None:
        """Skip this step on all ranks; with local steps, only on this rank. Collective.

        With local steps, all ranks receive ``flags`` at the next synchronization.
        """
        del flags
        self.optimizer.zero_grad()

    def counted(self, loss: float, batch: StepBatch, num_samples: int) -> tuple[float, int]:
        """Return the loss and the number of samples that this rank adds to the next record."""
        del batch
        return loss, num_samples

    # -- rounds and epochs ----------------------------------------------------------------------

    @property
    def is_between_rounds(self) -> bool:
        """Whether the ranks have synchronized after the last step."""
        return True

    def resume_clock(self) -> None:
        """Exclude the time since the last step from measured step times. Local."""

    def end_epoch(self, loss: float) -> None:
        """Receive the mean training loss of an epoch, identical on all ranks; default no-op."""

    def finish(self) -> None:
        """Synchronize the models of all ranks. Collective."""

    def averaged(self) -> AbstractContextManager[None]:
        """Return a context in which the model has the mean of all replicas. Collective."""
        return nullcontext()

    def settled(self) -> AbstractContextManager[object]:
        """Return a context in which model and optimizer can be saved. Collective."""
        return nullcontext()

    def close(self) -> None:
        """Remove the hooks of the method. Local."""

    # -- tests ----------------------------------------------------------------------------------

    def share_buffers(self) -> None:
        """Broadcast the buffers of rank 0, such as running means. Collective."""
        for buffer in self.model.buffers():
            with on_host(buffer) as values:
                self.comm.broadcast_(values).wait()

    def test_parts(
        self, values: tuple[Tensor, Tensor], loader: Loader
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield ``(inputs, labels, output)`` for pieces of this rank's part of a test batch.

        ``output`` is None unless several ranks compute it together; the call is then collective.
        """
        del loader
        if len(values[0]):
            yield *values, None
        else:
            self.forward_empty(values[0])

    def forward_empty(self, inputs: Tensor, times: int = 1) -> None:
        """Run the collectives of ``times`` forward passes on a rank without samples.

        No-op unless the forward pass of the model communicates.
        """

    def sum_rows(self, rows: Sequence[Sequence[float]], num_columns: int) -> list[float]:
        """Return the sum of each column over the rows of all ranks. Collective.

        Each rank rounds its sums only once, so the order of its rows does not matter.
        """
        sums = torch.tensor(column_sums(rows, num_columns), dtype=torch.float64)
        self.comm.allreduce_(sums).wait()
        return sums.tolist()

    # -- replicas -------------------------------------------------------------------------------

    @property
    def replicas_agree(self) -> bool:
        """Whether all ranks must have identical parameters now; identical on all ranks."""
        return True

    @property
    def states_agree(self) -> bool:
        """Whether all ranks must have identical parameters and optimizer state now."""
        return True

    @property
    def heals(self) -> bool:
        """Whether a replica that differs is overwritten with the values of the majority."""
        return self.config.train.on_divergence == "heal"

    def check_replicas(self) -> bool:
        """Compare the replicas. Collective.

        If replicas may differ now, return False without a comparison; otherwise return True.

        Raises:
            ReplicaError: the replicas differ but must not; on all ranks.
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
        """Return a hash of parameters and optimizer state, identical on all ranks. Collective."""
        return state_hash(self._parameters_and_optimizer(), self.comm)

    def _parameters_and_optimizer(self) -> dict[str, Any]:
        parameters = dict(self.model.named_parameters())
        return {"model": parameters, "optimizer": self.optimizer.state_dict()}

    # -- layout of the model --------------------------------------------------------------------

    @property
    def num_parameters(self) -> int:
        """Number of parameter elements of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def layout(self) -> str | None:
        """Description of how the ranks divide the model; None if each rank has the whole model."""
        return None

    @property
    def seed_offset(self) -> int:
        """Offset of this rank's random seed, so that dropout differs between samples."""
        return self.comm.rank

    def share_out(self, *loaders: Loader) -> None:
        """Configure the loaders to read the samples of this rank's replica. Local."""

    # -- checkpoints ----------------------------------------------------------------------------

    @property
    def codec(self) -> Codec | None:
        """Codec of the gradients; None if gradients are not compressed."""
        return None

    def local_state(self) -> dict[str, Any]:
        """Return the model and optimizer state of this rank, for ``restore_model``.

        Collective if the ranks divide the model.
        """
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def shared_state(self) -> dict[str, Any]:
        """Return the state from which any number of ranks can continue. Collective.

        Buffers such as running means differ between ranks; the state has the buffers of rank 0.
        """
        model, optimizer = self._shared_model(), self._shared_optimizer()
        return {"model": model, "optimizer": optimizer, **self._empty_state()}

    def _empty_state(self) -> dict[str, Any]:
        """Return the layout, and None for each entry that only some mechanisms save."""
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
        """Return the state that only this rank has, such as its replica. Collective."""
        return dict.fromkeys(("replica", "sync", "codec", "noise"))

    def restore(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Continue from a saved state. Collective.

        Args:
            shared: result of ``shared_state()``.
            own: result of ``own_state()`` on this rank; None if the number of ranks has changed.

        Raises:
            CheckpointError: the state does not match the model, the optimizer or the method.
        """
        try:
            # Runs with local steps save the replica of each rank; other methods ignore it.
            replica = own.get("replica") if own and self.takes_own_steps else None
            self.restore_model(shared, replica)
        except (RuntimeError, ValueError) as error:
            raise CheckpointError(
                f"model and optimizer must match the checkpoint, but {error}; "
                f"continue with the configuration that the checkpoint was written with"
            ) from error

    @torch.no_grad()
    def restore_model(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Load model and optimizer of ``shared``, then this rank's replica ``own`` if given."""
        check_fit(shared["model"], self.model.state_dict())
        self.model.load_state_dict(shared["model"])
        # The optimizer keeps references to the tensors, so it must get copies.
        saved = mapped((own or shared)["optimizer"], Tensor.clone)
        self.optimizer.load_state_dict(saved)
        _restore_scalars(self.optimizer, saved)
        if own:
            for name, parameter in self.model.named_parameters():
                parameter.copy_(own["parameters"][name])

    def wanted(self, latest: Callable[[], Any]) -> Mapping[str, Shard] | None:
        """Return the tensor shards that this rank reads from a checkpoint; None for all tensors.

        Args:
            latest: collective function that returns the folder of the newest checkpoint, or None.
        """
        del latest
        return None

    # -- records and text -----------------------------------------------------------------------

    @property
    def facts(self) -> Figures:
        """Entries for the record that each start or resume of a run writes."""
        return {"layout": self.layout} if self.layout else {}

    @property
    def figures(self) -> Figures:
        """Entries for each step record; identical on all ranks."""
        return {}

    @property
    def noise_scale(self) -> float | None:
        """Gradient noise scale in samples; None if not measured. Collective."""
        return None

    @property
    def savings(self) -> Savings | None:
        """Bytes that compression saves; None if gradients are not compressed."""
        return None

    def describe(self) -> list[tuple[str, str]]:
        """Return rows ``(title, text)`` for the description of a run."""
        return [("layout", self.layout)] if self.layout else []


def column_sums(rows: Sequence[Sequence[float]], num_columns: int) -> list[float]:
    """Return the sum of each column of ``rows``, computed exactly and rounded once."""
    columns = zip(*rows, strict=True) if rows else [()] * num_columns
    return [exact_sum(column) for column in columns]


def check_fit(have: Mapping[str, Tensor], want: Mapping[str, Tensor]) -> None:
    """Check that a checkpoint has exactly the tensors of a model, with equal shapes and dtypes.

    Args:
        have: tensors of the checkpoint.
        want: tensors of the model.

    Raises:
        CheckpointError: tensors differ; the message lists each difference.
    """
    if lines := misfits(have, want):
        raise CheckpointError(
            f"tensors of model and checkpoint must have the same names, shapes and dtypes, but "
            f"{len(lines)} {'tensors differ' if len(lines) != 1 else 'tensor differs'}; build the "
            f"model that was saved, or convert the checkpoint: load it with "
            f"hpctrain.checkpoint.load, change the state, and save it with "
            f"hpctrain.checkpoint.save:\n  " + "\n  ".join(lines)
        )


def _restore_scalars(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore the dtype of scalars in the optimizer state, such as ``mu_product`` of NAdam.

    torch casts these scalars to the dtype of the parameter, which changes their values.
    """
    places = (place for group in saved["param_groups"] for place in group["params"])
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for place, parameter in zip(places, parameters, strict=True):
        state = optimizer.state.get(parameter, {})
        for name, value in saved["state"].get(place, {}).items():
            is_scalar = isinstance(value, Tensor) and value.dim() == 0 and name in state
            if is_scalar and state[name].dtype != value.dtype:
                state[name] = value.to(state[name].device)
