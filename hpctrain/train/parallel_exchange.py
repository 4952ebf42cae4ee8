"""Exchange of ranks that divide the model as ``[parallel]`` says."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

from hpctrain.checkpoint.format.manifest import CheckpointManifest
from hpctrain.checkpoint.format.shard import Shard
from hpctrain.comm.communicator import Communicator
from hpctrain.core.user_error import noted
from hpctrain.data.loader import Loader
from hpctrain.train.model_parallel import ModelParallel
from hpctrain.train.refusals import step_name
from hpctrain.train.run_config import RunConfig
from hpctrain.train.step_exchange import Forward, LossObserver, StepBatch, StepExchange


class ParallelExchange(StepExchange):
    """Computes a step with tensor, sequence, pipeline and data parallelism, and ZeRO.

    Args:
        config: of the run.
        comm: all ranks.
        method: this rank's part of the model, and its optimizer.
    """

    method: ModelParallel

    def __init__(self, config: RunConfig, comm: Communicator, method: ModelParallel) -> None:
        super().__init__(config, comm, method.model, method.optimizer, method)

    def report_loss(self, loss: float) -> None:
        """Send this rank's loss with the message of the step. Local."""
        self.method.tell_loss(loss)

    def mean_loss(self, loss: float) -> float:
        """Return the mean loss of all samples of the step."""
        del loss
        return self.method.mean_loss

    def backward(
        self, batch: StepBatch, forward: Forward, observer: LossObserver
    ) -> tuple[float, int]:
        """Compute and average the gradients of this rank's part of the model. Collective."""
        with noted(step_name(self.config), *batch.tensors):
            loss = self.method.backward(
                batch.tensors,
                lambda *part: forward(*part)[1],
                num_samples=batch.num_global,
                see=observer.see_loss,
            )
        return loss, batch.num_samples if self.method.leads else 0

    def clip(self, max_norm: float) -> float:
        """Clip the gradient of the whole model; return its norm before. Collective."""
        return self.method.clip(max_norm)

    def gradient_norm(self) -> float:
        """Return the norm of the gradient of the whole model. Collective."""
        return self.method.clip(float("inf"))

    def clip_values(self, max_value: float) -> None:
        """Clip each element of this rank's gradients. Local."""
        self.method.clip_values(max_value)

    def share_buffers(self) -> None:
        """Give all replicas the buffers of the first one. Collective."""
        self.method.share_buffers()

    def test_parts(
        self, values: tuple[Tensor, Tensor], loader: Loader
    ) -> Iterator[tuple[Tensor, Tensor, Tensor | None]]:
        """Yield samples and output of a replica, on one of its ranks. Collective."""
        del loader
        output = self.method.output(*values)
        if output is not None:
            yield *values, output

    def check_replicas(self) -> bool:
        """Compare the replicas of each part of the model. Collective."""
        self.method.check_replicas()
        return True

    def hash(self) -> str:
        """Return a hash of the parts of all ranks; other layouts have another one. Collective."""
        return self.method.hash()

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters of the whole model."""
        return self.method.num_parameters

    @property
    def layout(self) -> str | None:
        """How ranks divide the model, such as ``dp=2 x tp=2``."""
        return self.method.describe()

    @property
    def seed_offset(self) -> int:
        """Number of the replica: ranks of a tp group draw the same numbers."""
        return self.method.seed

    def share_out(self, *loaders: Loader) -> None:
        """Let the loaders read the samples of this rank's replica. Local."""
        self.method.share_out(*loaders)

    def local_state(self) -> dict[str, Any]:
        """Return model and optimizer as shards of whole tensors. Collective."""
        return self.method.state.state()

    def shared_state(self) -> dict[str, Any]:
        """Return the state that any layout can continue from. Collective."""
        return {**self._empty_state(), **self.local_state()}

    def restore_model(self, shared: Mapping[str, Any], own: Mapping[str, Any] | None) -> None:
        """Load this rank's shards of model and optimizer."""
        del own
        self.method.state.load(shared)

    def wanted(self, latest: Callable[[], Any]) -> Mapping[str, Shard] | None:
        """Return the shards of this rank in the newest checkpoint. Collective."""
        newest = latest()
        if newest is None:
            return None
        return self.method.state.wanted(CheckpointManifest.read(newest).tensors)
