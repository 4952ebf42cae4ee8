"""Configuration of a run: the tables of the TOML file that belong to no other package.

A field is a key: its type hint is the check, the string below it is its description.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from hpctrain.checkpoint.checkpoint_config import CheckpointConfig
from hpctrain.comm.comm_config import CommConfig
from hpctrain.core.checks import (
    AtLeast0,
    Bounds,
    CheckedFields,
    Count,
    Decay,
    Number,
    Positive,
    Texts,
    Time,
    require,
    require_values,
)
from hpctrain.data.data_config import DataConfig
from hpctrain.optim.optimizer_config import OptimizerConfig, ScheduleConfig
from hpctrain.parallel.parallel_config import ParallelConfig
from hpctrain.train.sync_config import SYNCHRONOUS, SyncConfig

_Rules = Mapping[str, tuple[Any, str]]

_NO_SCALE = ("fp32", "bf16"), "all ranks scale one loss together: set bf16, which needs no scale"
_NO_ROLLBACK = "stop", "skip", "ignore"
_ON_HOST = ("auto", "cpu"), "it works on the host: divide state on GPUs by parallel.zero = 1"
_UNCOMPRESSED = "none", "ranks send gradients as they are"
_UNAVERAGED = 0, "servers step by gradients that ranks have not averaged"

# By the demand of one key: the values that others must have, and the reason (`require_values`).
_REPRODUCIBLE: _Rules = {
    "data.on_corrupt": ("raise", "samples that are left out would move those of a rank"),
    "train.accumulate": (1, "micro-shards are such pieces: set train.micro_shards"),
    "train.device": _ON_HOST,
    "train.precision": _NO_SCALE,
    "train.shard": (("none", "auto"), "gradients are summed by a separate rule"),
    "sync.method": (SYNCHRONOUS, "local steps depend on the number of ranks"),
    "sync.compression": _UNCOMPRESSED,
}
_SHARDED: _Rules = {"train.device": _ON_HOST, "sync.compression": _UNCOMPRESSED}
_UNHEALED: _Rules = {"train.on_divergence": ("stop", "healing compares the replicas of all ranks")}
_LOCAL: _Rules = {
    "data.on_corrupt": (
        "raise",
        "its ranks do not exchange every step: repair the data, or set sync.method = synchronous",
    ),
    "train.ema": (0, "ranks of a local method average their own weights"),
    "train.on_non_finite": (_NO_ROLLBACK, "ranks of a local method decide separately: set skip"),
    "train.on_spike": ("none", "ranks of a local method have their own losses"),
    "train.precision": _NO_SCALE,
    "train.shard": (("none", "auto"), "ranks of a local method have their own parameters"),
}
_ASYNC: _Rules = {"train.clip_norm": _UNAVERAGED, "train.clip_value": _UNAVERAGED}
_OFFLOADED: _Rules = {
    "train.on_non_finite": (_NO_ROLLBACK, "offload saves the memory of a snapshot: set skip"),
    "train.on_spike": (
        ("none", "skip", "lower_rate"),
        "offload saves the memory of a snapshot: set skip",
    ),
}
_RECOMPUTED: _Rules = {
    "train.activation_checkpointing": ([], "recompute chooses layers by itself")
}
_DIVIDED: _Rules = {
    "log.noise_scale": (False, "ranks see no gradient of a replica"),
    "sync.method": (SYNCHRONOUS, "ranks have parts of one model"),
    "sync.compression": ("none", "gradients are summed by torch"),
    "train.compile": (False, "layers communicate with other ranks"),
    "train.ema": (0, "averages are kept of whole models"),
    "train.on_divergence": ("stop", "ranks have parts"),
    "train.precision": _NO_SCALE,
    "train.reproducible": (False, "sums depend on the layout"),
    "train.shard": (("none", "auto"), "ranks have parts: set parallel.zero to divide state"),
}
_PIPELINED: _Rules = {
    "train.accumulate": (1, "micro-batches are such pieces: set parallel.micro_batches")
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
    """First weights: a run directory, a checkpoint, or a file .pt or .safetensors with a state
    dict. Those that train.ema has averaged, where there are such."""
    init_strict: bool = True
    """Whether all tensors must match in name and shape; else those that do not are listed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig(CheckedFields):
    """What is minimised: a mean over the samples of a batch."""

    table: ClassVar = "loss"
    target: str = "cross_entropy"
    """A name in torch.nn.functional, or "module:function", called with (output, label, **args)."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig(CheckedFields):
    """How long, in which batches, and how a step is calculated."""

    table: ClassVar = "train"
    epochs: Number = 10
    """Passes over the training data."""
    global_batch: Number = 64
    """Samples of one step, over all ranks: the same training on any number of ranks."""
    device: str = "auto"
    """Where: cpu, an accelerator by torch's name, such as cuda, of which each rank takes one, or
    auto: an accelerator where every rank has one, but for reproducible and shard = node."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """How forward calculates: as the model is (fp32), or by autocast in 16 bits; weights stay as
    they are. fp16 scales the loss; where gradients overflow, all ranks leave out the step."""
    accumulate: Number = 1
    """Pieces in which each rank takes its part of a batch one after the other, to save memory:
    the same step, but for what depends on a whole batch, such as BatchNorm."""
    activation_checkpointing: Texts = field(default_factory=list)
    """Patterns of names of modules, such as "blocks.*", that calculate forward once more in
    backward, to save memory."""
    compile: bool = False
    """Whether the model is compiled by torch.compile."""
    compile_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of torch.compile, such as mode; dynamic is false unless it is set."""
    ema: Decay = 0.0
    """Decay of a moving average of the weights, such as 0.999: the model that is tested, and
    exported by --only ema; 0 for none. Buffers are those of the model."""
    clip_norm: AtLeast0 = 0.0
    """Largest norm of the averaged gradient; 0 does not clip, as with ssp, downpour and async."""
    clip_value: AtLeast0 = 0.0
    """Largest element of the averaged gradient, behind clip_norm; 0 does not clip."""
    on_non_finite: Literal["stop", "skip", "rollback", "ignore"] = "stop"
    """A loss that is NaN or infinite ends all ranks (stop), or they leave out that step (skip), or
    go back to the last snapshot (rollback), or nobody looks (ignore). Gradients by a finite loss
    are looked at with skip, rollback, clip_norm or clip_value. That of a test ends all ranks too
    (stop), or is a warning."""
    on_spike: Literal["none", "skip", "rollback", "lower_rate"] = "none"
    """A loss far above the last ones is a step like others (none), or all ranks leave out that
    step (skip), go back to the last snapshot (rollback), or take it and some more at a lower
    learning rate (lower_rate)."""
    spike_deviations: Positive = 6.0
    """How far above: so many standard deviations above the median of the last losses. They are
    estimated by the median absolute deviation, and are 1 % of the median at least."""
    spike_window: Number = 64
    """Steps whose losses are compared; before half of them are known, nothing is a spike."""
    snapshot_every: Number = 100
    """With rollback: steps between two snapshots of weights, optimizer state and random numbers,
    which each rank keeps in memory; batches that came since stay left out."""
    lowered_rate: Annotated[float, Bounds(above=0, below=1)] = 0.1
    """With lower_rate: by what the learning rate is multiplied in the step of a spike."""
    lowered_steps: Number = 100
    """With lower_rate: steps in which it rises to that of the schedule again."""
    max_skips: Count = 100
    """Steps that may be left out in a run, those that rollback takes back among them, before all
    ranks stop; 0 for any number."""
    shard: Literal["none", "node", "auto"] = "none"
    """Every rank keeps all parameters and the state of the optimizer (none), or a node has them
    once and its ranks step a part each (node): the same bits (but with clip_norm), less time and
    memory; auto is node where optimizer and run allow it and a node has two ranks."""
    master_dtype: Literal["none", "fp32"] = "none"
    """With shard = node: what parameters of 16 bits are kept and stepped in, too (fp32)."""
    check_replicas: Literal["test", "never"] | Number = "test"
    """Whether all ranks have the same weights is looked at before each test, after so many steps
    too, or never; with a local sync.method only where they have just averaged."""
    on_divergence: Literal["stop", "heal"] = "stop"
    """What becomes of ranks whose weights or optimizer state are not those of the others: they end
    the run (stop), or take the values of more than half of the ranks and go on (heal)."""
    reproducible: bool = False
    """The same bits on any number of ranks, on processors of one type: slower, as each rank takes
    its micro-shards one after the other, on one thread."""
    micro_shards: Count = 0
    """Equal parts of the global batch that reproducible fixes, for example for BatchNorm: a power
    of two, and the most ranks that there can be; 0 takes the smallest for the ranks of the start.
    Another number has other bits."""

    def check(self) -> None:
        """Raise ``ConfigError`` if keys contradict each other."""
        require(
            self.micro_shards & (self.micro_shards - 1) == 0,
            "train.micro_shards must be a power of two, or 0",
            self.micro_shards,
        )
        require(
            self.master_dtype == "none" or self.shard == "node",
            "train.master_dtype must be none, or fp32 with train.shard = node: set that too",
            self.master_dtype,
        )
        if self.reproducible:
            self._check_micro_shards(self.micro_shards)

    def micro_shards_on(self, num_ranks: int) -> int | None:
        """Return the number of micro-shards of a run that starts on ``num_ranks`` ranks.

        Returns None without ``train.reproducible``.

        Raises:
            ConfigError: the global batch has fewer samples than micro-shards.
        """
        if not self.reproducible:
            return None
        found = self.micro_shards or 1 << (num_ranks - 1).bit_length()
        self._check_micro_shards(found)
        return found

    def _check_micro_shards(self, number: int) -> None:
        rule = f"train.global_batch must give each of {number} micro-shards a sample, for "
        rule += "train.reproducible = true"
        require(self.global_batch >= number, rule, self.global_batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class TestConfig(CheckedFields):
    """How the model is judged, on the test data."""

    table: ClassVar = "test"
    __test__ = False  # a name that begins with Test is no test

    metric: str | Texts = "accuracy"
    """One of accuracy, top5 (any number), f1 (macro), auc, loss, "module:function" from (output,
    label) to one value per sample; or a list, whose first judges: the best, and patience."""
    mode: Literal["auto", "max", "min"] = "auto"
    """Whether the larger or the smaller value of the first metric is better; auto: of the loss
    the smaller, else the larger."""
    every_epochs: Number = 1
    """Epochs between two tests; the last epoch is always tested."""
    patience: Count = 0
    """The run ends after so many tests in a row without a better one, and keeps the best
    checkpoint; 0 for never."""

    def check(self) -> None:
        """Raise ``ConfigError`` if keys contradict each other."""
        names = [name.rpartition(":")[2] for name in self.metrics]
        is_set = 0 < len(names) == len(set(names))
        require(is_set, "test.metric must have names, each once", self.metric)

    @property
    def metrics(self) -> list[str]:
        """All metrics; the first one judges."""
        return [self.metric] if isinstance(self.metric, str) else self.metric


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig(CheckedFields):
    """What is written down."""

    table: ClassVar = "log"
    every_steps: Number = 10
    """Steps between two records in metrics.jsonl, about: an epoch is cut into equal parts."""
    to: Texts = field(default_factory=list)
    """Loggers besides: "csv", "prometheus", "tensorboard", "wandb", or "module:function" that
    takes the run's folder and its configuration and returns an object with write(record) and
    close()."""
    plots: bool = True
    """Draw plots/training.png at the end, or where the run stops; needs matplotlib."""
    hash_every: Count = 0
    """Steps between two hashes of weights and optimizer state in metrics.jsonl; 0 for none."""
    noise_scale: bool = False
    """Whether records have the gradient noise scale, a batch above which more ranks hardly pay:
    from gradients of ranks, or of the pieces of train.accumulate on a single rank."""
    profile: Annotated[list[int], Bounds(each=int)] = field(default_factory=list)
    """First and last step, counted from 1, of a Chrome trace in profile/ of the run directory,
    such as [20, 25]; when empty, none is written."""
    profile_ranks: Annotated[list[int], Bounds(each=int)] = field(default_factory=lambda: [0])
    """Ranks that write one."""

    def check(self) -> None:
        """Raise ``ConfigError`` if keys contradict each other."""
        steps = self.profile
        require(
            not steps or (len(steps) == 2 and 1 <= steps[0] <= steps[1]),
            "log.profile must be the first and the last step, counted from 1",
            steps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StopConfig(CheckedFields):
    """When a run saves its state and ends with code 85, to go on with --resume."""

    table: ClassVar = "stop"
    after: Time = ""
    """Budget of time, such as "11h50min", from the start of each part of the run."""
    margin: Time = "2min"
    """Time before the end of a Slurm job at which to stop, where Slurm tells the end; at most a
    tenth of the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig(CheckedFields):
    """One training run."""

    name: str = "run"
    """Name of the run."""
    output_dir: str = ""
    """Folder that the run writes into, which must be new; when empty, runs/NAME."""
    seed: Annotated[int, Bounds(least=0, below=2**63)] = 0
    """Fixes the first weights and the order of the samples."""
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
            "name must be a plain word, the name of a folder",
            self.name,
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
