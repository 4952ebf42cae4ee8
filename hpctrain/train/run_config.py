"""Configuration of a run: the tables of the TOML file that no other package defines.

Each field is a key of the file. The type hint of the field defines how values are checked, and the
string below the field describes the key.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from hpctrain.checkpoint.checkpoint_config import CheckpointConfig
from hpctrain.core.checks import (
    AtLeast0,
    Bounds,
    CheckedFields,
    Count,
    Decay,
    Number,
    Overlap,
    Positive,
    Size,
    Texts,
    Time,
    require,
    require_values,
)
from hpctrain.core.paths import absolute
from hpctrain.core.units import parse_size
from hpctrain.data.data_config import DataConfig
from hpctrain.optim.optimizer_config import OptimizerConfig, ScheduleConfig
from hpctrain.parallel.parallel_config import ParallelConfig
from hpctrain.train.sync_config import SYNCHRONOUS, SyncConfig

_Rules = Mapping[str, tuple[Any, str]]

_NO_SCALE = (
    ("fp32", "bf16"),
    "all ranks must have the same loss scale; set bf16, which needs no scale",
)
_NO_ROLLBACK = "stop", "skip", "ignore"
_ON_CPU = ("auto", "cpu"), "train.reproducible is implemented on CPUs only"
_ON_HOST = (
    ("auto", "cpu"),
    "state is divided in host memory; set parallel.zero = 1 to divide state on GPUs",
)
_UNCOMPRESSED = "none", "gradients are sent uncompressed"
_UNAVERAGED = 0, "servers apply gradients before they are averaged"

# Each table below holds the values that other keys must have if one key has a certain value, and
# the reason; `require_values` checks them.
_REPRODUCIBLE: _Rules = {
    "data.on_corrupt": ("raise", "skipped samples would move samples between micro-shards"),
    "train.accumulate": (1, "micro-shards accumulate gradients too; set train.micro_shards"),
    "train.device": _ON_CPU,
    "train.precision": _NO_SCALE,
    "train.shard": (("none", "auto"), "micro-shards are summed in a fixed order"),
    "sync.method": (SYNCHRONOUS, "local steps depend on the number of ranks"),
    "sync.compression": _UNCOMPRESSED,
}
_SHARDED: _Rules = {"train.device": _ON_HOST, "sync.compression": _UNCOMPRESSED}
_UNHEALED: _Rules = {"train.on_divergence": ("stop", "heal compares the replicas of all ranks")}
_LOCAL: _Rules = {
    "data.on_corrupt": (
        "raise",
        "ranks do not communicate in every step; repair the data, or use synchronous training",
    ),
    "train.ema": (0, "ranks of a local method average their own weights"),
    "train.on_non_finite": (_NO_ROLLBACK, "ranks of a local method decide separately; set skip"),
    "train.on_spike": ("none", "ranks of a local method have their own losses"),
    "train.precision": _NO_SCALE,
    "train.shard": (("none", "auto"), "ranks of a local method have their own parameters"),
}
_ASYNC: _Rules = {"train.clip_norm": _UNAVERAGED, "train.clip_value": _UNAVERAGED}
_OFFLOADED: _Rules = {
    "train.on_non_finite": (
        _NO_ROLLBACK,
        "a snapshot needs the memory that offload saves; set skip",
    ),
    "train.on_spike": (
        ("none", "skip", "lower_rate"),
        "a snapshot needs the memory that offload saves; set skip",
    ),
}
_RECOMPUTED: _Rules = {"train.activation_checkpointing": ([], "recompute chooses the layers")}
_DIVIDED: _Rules = {
    "log.noise_scale": (False, "no rank has all gradients of a replica"),
    "sync.method": (SYNCHRONOUS, "ranks have parts of one model"),
    "sync.compression": ("none", "gradients are summed by torch"),
    "train.compile": (False, "layers communicate with other ranks"),
    "train.ema": (0, "averages need the whole model"),
    "train.on_divergence": ("stop", "ranks have different parts"),
    "train.precision": _NO_SCALE,
    "train.reproducible": (False, "the order of sums depends on the layout"),
    "train.shard": (
        ("none", "auto"),
        "ranks have parts of one model; set parallel.zero to divide state",
    ),
}
_PIPELINED: _Rules = {
    "train.accumulate": (1, "micro-batches accumulate gradients too; set parallel.micro_batches")
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig(CheckedFields):
    """The network."""

    table: ClassVar = "model"
    target: str = ""
    """Function "module:function" that takes args and returns a torch.nn.Module."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the target."""
    init_from: str = ""
    """Initial weights: a run directory, a checkpoint, or a .pt or .safetensors file with a state
    dict. Weights that train.ema has averaged are used if the run has them."""
    init_strict: bool = True
    """Whether all tensors must match in name and shape; if false, tensors that do not match keep
    their initial values and are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig(CheckedFields):
    """Loss to minimise, a mean over the samples of a batch."""

    table: ClassVar = "loss"
    target: str = "cross_entropy"
    """Function of torch.nn.functional, or "module:function", called with (output, label,
    **args)."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig(CheckedFields):
    """Length of the training, batches, and computation of a step."""

    table: ClassVar = "train"
    epochs: Number = 10
    """Passes over the training data."""
    global_batch: Number = 64
    """Number of samples per step, over all ranks; does not depend on the number of ranks."""
    device: str = "auto"
    """Device of each rank: cpu, or an accelerator by its name in torch, such as cuda. auto is the
    accelerator if every rank has one, else cpu; with reproducible or shard = node, auto is cpu."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of forward: the dtype of the model (fp32), or autocast to a 16-bit dtype (bf16,
    fp16); weights keep their dtype. With fp16 the loss is scaled, and all ranks skip a step if
    gradients overflow."""
    accumulate: Number = 1
    """Number of micro-batches into which each rank divides its part of a batch, to save memory;
    gradients are accumulated. Results change only with layers that use batch statistics, such as
    BatchNorm."""
    activation_checkpointing: Texts = field(default_factory=list)
    """Modules whose activations are not stored, but computed again in backward, to save memory:
    names, or patterns of names such as "blocks.*"."""
    compile: bool = False
    """Whether to compile the model with torch.compile."""
    compile_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of torch.compile, such as mode; dynamic is false by default."""
    ema: Decay = 0.0
    """Decay of a moving average of the weights, such as 0.999; 0 for none. Tests use the averaged
    weights with the buffers of the model, and --only ema exports them."""
    clip_norm: AtLeast0 = 0.0
    """Largest norm of the averaged gradient; 0 for no clipping. Must be 0 with ssp, downpour and
    async."""
    clip_value: AtLeast0 = 0.0
    """Largest element of the averaged gradient, applied after clip_norm; 0 for no clipping."""
    on_non_finite: Literal["stop", "skip", "rollback", "ignore"] = "stop"
    """Action of all ranks if a loss is NaN or infinite: end the run (stop), skip the step (skip),
    return to the last snapshot (rollback), or none, without a check (ignore). Gradients of a
    finite loss are checked with skip, rollback, clip_norm or clip_value. If the loss of a test is
    not finite, the run ends (stop), or a warning is logged (otherwise)."""
    on_spike: Literal["none", "skip", "rollback", "lower_rate"] = "none"
    """Action of all ranks if a loss is far above the previous losses: none, skip the step (skip),
    return to the last snapshot (rollback), or take this step and the next ones at a lower learning
    rate (lower_rate)."""
    spike_deviations: Positive = 6.0
    """Threshold of a spike: number of standard deviations above the median of the previous losses.
    The standard deviation is estimated by the median absolute deviation, and is at least 1 % of
    the median."""
    spike_window: Number = 64
    """Number of previous losses that are compared. No spike is reported until half of this number
    is known."""
    snapshot_every: Number = 100
    """With rollback: steps between two snapshots of weights, optimizer state and random number
    generators, which each rank keeps in memory; a rollback skips the batches since the
    snapshot."""
    lowered_rate: Annotated[float, Bounds(above=0, below=1)] = 0.1
    """With lower_rate: factor of the learning rate in the step of a spike."""
    lowered_steps: Number = 100
    """With lower_rate: number of steps until the learning rate is again the rate of the
    schedule."""
    max_skips: Count = 100
    """Largest number of steps of a run that may be skipped or rolled back before all ranks stop; 0
    for no limit."""
    shard: Literal["none", "node", "auto"] = "none"
    """none: every rank stores all parameters and the state of the optimizer. node: the ranks of a
    node share one copy, and each rank updates a part of the copy, which takes less time and
    memory; results are bitwise identical, except with clip_norm. auto: node if the optimizer and
    the run allow it and a node has two ranks or more, else none."""
    master_dtype: Literal["none", "fp32"] = "none"
    """With shard = node: dtype of an additional copy of 16-bit parameters, which the optimizer
    updates (fp32); none for no copy."""
    check_replicas: Literal["test", "never"] | Number = "test"
    """When to check that all ranks have the same weights: before each test (test), before each
    test and every N steps (N), or never. With a local sync.method, weights are checked only if the
    ranks have just averaged them."""
    on_divergence: Literal["stop", "heal"] = "stop"
    """Action if the weights or the optimizer state of some ranks differ: end the run (stop), or
    copy the values of the majority of ranks to the other ranks and continue (heal)."""
    reproducible: bool = False
    """Bitwise identical results on any number of ranks, on processors of one type; slower, because
    each rank computes its micro-shards one after the other, on one thread."""
    micro_shards: Count = 0
    """With reproducible: number of equal parts of the global batch, a power of two. It is also the
    largest possible number of ranks. BatchNorm uses the statistics of one part. Results with
    another number differ. 0 chooses the smallest number for the ranks of the first start."""

    def check(self) -> None:
        """Raise ``ConfigError`` if keys contradict each other."""
        require(
            self.micro_shards & (self.micro_shards - 1) == 0,
            "train.micro_shards must be a power of two, or 0",
            self.micro_shards,
            "0 chooses the smallest for the ranks of the start",
        )
        require(
            self.master_dtype == "none" or self.shard == "node",
            "train.master_dtype must be none without train.shard = node",
            self.master_dtype,
            "set train.shard = node too",
        )
        if self.reproducible:
            self._check_micro_shards(self.micro_shards)

    def micro_shards_on(self, num_ranks: int) -> int | None:
        """Return the number of micro-shards of a run that starts on ``num_ranks`` ranks.

        Without ``train.reproducible``, return None.

        Raises:
            ConfigError: the global batch has fewer samples than micro-shards.
        """
        if not self.reproducible:
            return None
        found = self.micro_shards or 1 << (num_ranks - 1).bit_length()
        self._check_micro_shards(found)
        return found

    def _check_micro_shards(self, number: int) -> None:
        require(
            self.global_batch >= number,
            f"train.global_batch must be at least the number of micro-shards, {number}, with "
            f"train.reproducible = true",
            self.global_batch,
            "use a larger batch, or a smaller train.micro_shards",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TestConfig(CheckedFields):
    """Evaluation of the model on the test data."""

    table: ClassVar = "test"
    __test__ = False  # pytest must not collect this class

    metric: str | Texts = "accuracy"
    """Metric, or a list of metrics: accuracy, top5 (or another number), f1 (macro), auc, loss, or
    "module:function", which takes (output, label) and returns one value per sample. The first
    metric selects the best checkpoint and is used by patience."""
    mode: Literal["auto", "max", "min"] = "auto"
    """Whether the larger or the smaller value of the first metric is better; auto is min for loss,
    and max for the others."""
    every_epochs: Number = 1
    """Epochs between two tests; the last epoch is always tested."""
    patience: Count = 0
    """Number of consecutive tests without an improvement after which the run ends and keeps the
    best checkpoint; 0 for no limit."""

    def check(self) -> None:
        """Raise ``ConfigError`` if keys contradict each other."""
        names = [name.rpartition(":")[2] for name in self.metrics]
        is_set = 0 < len(names) == len(set(names))
        require(
            is_set,
            "test.metric must have at least one name, and each name once",
            self.metric,
            "set it to a name such as accuracy, or to a list",
        )

    @property
    def metrics(self) -> list[str]:
        """All metrics; the first metric determines the best test."""
        return [self.metric] if isinstance(self.metric, str) else self.metric


@dataclass(frozen=True, kw_only=True, slots=True)
class CommConfig(CheckedFields):
    """How gradients are sent."""

    table: ClassVar = "comm"
    overlap: Overlap = "auto"
    """When gradients are sent: by a thread, inline in the hooks, at the end of backward, or as the
    plan chooses (auto)."""
    bucket_size: Size = "25 MiB"
    """Size of the largest message of gradients. Larger messages hide latency; smaller messages are
    sent earlier."""
    ranks_per_node: Count = 0
    """Number of ranks of a simulated node, to divide one host into several nodes; 0 for the real
    nodes."""

    @property
    def bucket_bytes(self) -> int:
        """``bucket_size`` in bytes."""
        return parse_size(self.bucket_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig(CheckedFields):
    """Records of a run."""

    table: ClassVar = "log"
    every_steps: Number = 10
    """Approximate number of steps between two records in metrics.jsonl: an epoch is divided into
    equal parts."""
    to: Texts = field(default_factory=list)
    """Additional loggers: "csv", "prometheus", "tensorboard", "wandb", or "module:function", which
    takes the run directory and its configuration and returns an object with write(record) and
    close()."""
    plots: bool = True
    """Draw plots/training.png when the run ends or stops; needs matplotlib."""
    hash_every: Count = 0
    """Steps between two hashes of weights and optimizer state in metrics.jsonl; 0 for none."""
    noise_scale: bool = False
    """Whether to record the gradient noise scale: the batch size above which more ranks hardly
    reduce the time to reach a loss. The scale is estimated from the gradients of several ranks, or
    of several micro-batches (train.accumulate) on one rank."""
    profile: Annotated[list[int], Bounds(each=int)] = field(default_factory=list)
    """First and last step, counted from 1, of a Chrome trace in profile/ of the run directory,
    such as [20, 25]; when empty, no trace is written."""
    profile_ranks: Annotated[list[int], Bounds(each=int)] = field(default_factory=lambda: [0])
    """Ranks that write a trace."""

    def check(self) -> None:
        """Raise ``ConfigError`` if keys contradict each other."""
        steps = self.profile
        require(
            not steps or (len(steps) == 2 and 1 <= steps[0] <= steps[1]),
            "log.profile must be the first and the last step, counted from 1",
            steps,
            "set it such as [20, 25]",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StopConfig(CheckedFields):
    """When a run saves its state and exits with code 85; --resume continues it."""

    table: ClassVar = "stop"
    after: Time = ""
    """Time budget, such as "11h50min", from each start of the run."""
    margin: Time = "2min"
    """How long before the end of a Slurm job the run stops, if Slurm reports the end; at most a
    tenth of the time of the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(CheckedFields):
    """One training run."""

    name: str = "run"
    """Name of the run."""
    output_dir: str = ""
    """Run directory, which must not have results of another run; when empty, runs/NAME."""
    seed: Annotated[int, Bounds(least=0, below=2**63)] = 0
    """Seed of the initial weights and of the order of the samples."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainingConfig = field(default_factory=TrainingConfig)
    test: TestConfig = field(default_factory=TestConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stop: StopConfig = field(default_factory=StopConfig)

    def check(self) -> None:
        """Raise ``ConfigError`` if the value of a key conflicts with another key."""
        require(
            self.name != "" and self.name == Path(self.name).name and self.name not in {".", ".."},
            "name must be a directory name without slashes",
            self.name,
            "set output_dir for another directory",
        )
        for demand, is_made, rules in self._demands():
            if is_made:
                require_values(self, demand, rules)

    def _demands(self) -> Iterator[tuple[str, bool, _Rules]]:
        train, sync, parallel = self.train, self.sync, self.parallel
        yield "train.reproducible = true", train.reproducible, _REPRODUCIBLE
        yield "train.shard = node", train.shard == "node", _SHARDED
        yield "train.shard = node or auto", train.shard != "none", _UNHEALED
        yield "train.check_replicas = never", train.check_replicas == "never", _UNHEALED
        yield f"sync.method = {sync.method}", sync.is_local, _LOCAL
        yield f"sync.method = {sync.method}", sync.is_async, _ASYNC
        yield "parallel.offload", bool(parallel.offload), _OFFLOADED
        yield "parallel.recompute", parallel.recompute != "none", _RECOMPUTED
        yield f"parallel.{parallel.describe()}", parallel.divides, _DIVIDED
        yield "parallel.pp", parallel.pp > 1, _PIPELINED

    @property
    def keep_best(self) -> int:
        """Number of checkpoints of the best tests to keep."""
        return max(self.checkpoint.keep_best, int(self.test.patience > 0))

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.output_dir) if self.output_dir else Path("runs") / self.name


def located(config: RunConfig, start: Path) -> RunConfig:
    """Return the configuration with absolute paths; relative paths are resolved from ``start``."""

    def at(text: str) -> str:
        return text if text in {"", "auto", "cpu"} else str(absolute(text, base=str(start)))

    model, data, parallel = config.model, config.data, config.parallel
    return replace(
        config,
        model=replace(model, init_from=at(model.init_from)),
        data=replace(data, split=at(data.split), stage=at(data.stage)),
        parallel=replace(parallel, offload=at(parallel.offload)),
    )
