"""Configuration of a run: one frozen dataclass per table of the TOML file."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpctrain.core.config import OVERLAPS
from hpctrain.core.errors import ConfigError
from hpctrain.core.units import parse_bytes
from hpctrain.train.checkpoint_config import CheckpointConfig, StopConfig, require
from hpctrain.train.sync_config import SyncConfig

ORDERS = ("auto", "global", "window", "sequential")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The network."""

    target: str = ""
    """Function "module:function" that takes args and returns a torch.nn.Module."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The data sets."""

    target: str = ""
    """Function "module:function" that takes a communicator and args and returns (train, test)."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the target."""
    input: str = "x"
    """Field of a batch that the model is called with."""
    label: str = "y"
    """Field of a batch that the loss compares with the output of the model."""
    order: str = "auto"
    """Of the training samples: global, window, sequential, or auto by their size."""
    transform: str = ""
    """Function "module:function" that changes a batch, a dict of tensors, as it is read; of a
    sample, with per_sample."""
    test_transform: str = ""
    """The same for batches of the test: another function, none, or when empty transform."""
    per_sample: bool = False
    """Whether transform and test_transform take one sample at a time."""
    random: bool = False
    """Whether transform, with per_sample, takes a numpy.random.Generator of the sample as second
    argument; test_transform does not. In threads (workers = 0) the global generators are refused:
    their order is chance."""
    workers: int = 0
    """Processes on each rank that transform; 0 does it in threads."""
    worker_timeout_s: float = 300.0
    """Seconds that a worker may take for a batch before all ranks end with its stack; inf for
    ever."""
    prefetch: int = 4
    """Batches read ahead."""
    stage: str = ""
    """Folder on each node to copy the training data to, or auto; when empty, none is copied."""
    on_corrupt: str = "raise"
    """Damaged samples are an error (raise), or left out by all ranks together (skip)."""

    def __post_init__(self) -> None:
        """Check the words and the numbers."""
        require(self.order in ORDERS, f"data.order is one of {', '.join(ORDERS)}", self.order)
        require(self.workers >= 0, "data.workers is 0 or more", self.workers)
        require(
            self.worker_timeout_s > 0, "data.worker_timeout_s is positive", self.worker_timeout_s
        )
        require(
            self.per_sample or not self.random,
            "data.random gives each sample a generator: set data.per_sample = true too",
            self.random,
        )
        require(
            bool(self.test_transform) or not self.random,
            "data.random changes training samples at random, and a test takes data.transform too "
            "unless told: set data.test_transform to a function without a generator, or to none",
            self.random,
        )
        require(self.prefetch >= 1, "data.prefetch must be at least 1", self.prefetch)
        require(
            self.on_corrupt in ("raise", "skip"),
            "data.on_corrupt is raise or skip",
            self.on_corrupt,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class LossConfig:
    """What is minimised: a mean over the samples of a batch."""

    target: str = "cross_entropy"
    """A name in torch.nn.functional, or "module:function", called with (output, label, **args)."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the target."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Who turns gradients into steps."""

    name: str = "SGD"
    """Class in torch.optim."""
    lr: float = 0.05
    """Peak learning rate. It belongs to the global batch, so it does not depend on the ranks."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the class."""

    def __post_init__(self) -> None:
        """Check the learning rate."""
        require(self.lr > 0, "optimizer.lr must be positive", self.lr)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How the learning rate changes from step to step."""

    name: str = "cosine"
    """One of constant, linear, cosine: how the rate falls after the warm-up."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments: linear and cosine take final, the last rate over the peak (0)."""
    warmup_epochs: float = 0.0
    """The rate rises linearly from zero to its peak over so many epochs."""

    def __post_init__(self) -> None:
        """Check the warm-up."""
        require(
            self.warmup_epochs >= 0,
            "schedule.warmup_epochs must not be negative",
            self.warmup_epochs,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """How long and in which batches."""

    epochs: int = 10
    """Passes over the training data."""
    global_batch: int = 64
    """Samples of one step, over all ranks: the same training on any number of ranks."""
    clip_norm: float = 0.0
    """Largest norm of the averaged gradient; 0 does not clip."""
    on_non_finite: str = "stop"
    """A loss that is NaN or infinite ends all ranks (stop), or they leave out that step (skip), or
    nobody looks (ignore). Gradients by a finite loss are looked at with skip or clip_norm. That
    of a test ends all ranks too (stop), or is a warning."""
    check_replicas: str | int = "test"
    """Whether all ranks have the same weights is looked at before each test, after so many steps
    too, or never; with a local sync.method only where they have just averaged."""
    reproducible: bool = False
    """The same bits on any number of ranks, on processors of one type: slower, as each rank takes
    its micro-shards one after the other, on one thread."""
    micro_shards: int = 0
    """Equal parts of the global batch that reproducible fixes, for example for BatchNorm: a power
    of two, and the most ranks that there can be; 0 takes the smallest for the ranks of the start.
    Another number has other bits."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        require(self.epochs >= 1, "train.epochs must be at least 1", self.epochs)
        require(self.global_batch >= 1, "train.global_batch must be at least 1", self.global_batch)
        require(self.clip_norm >= 0, "train.clip_norm must not be negative", self.clip_norm)
        require(
            self.on_non_finite in ("stop", "skip", "ignore"),
            "train.on_non_finite is stop, skip or ignore",
            self.on_non_finite,
        )
        every = self.check_replicas
        require(
            every in ("test", "never") or (isinstance(every, int) and every >= 1),
            "train.check_replicas is test, a number of steps from 1, or never",
            every,
        )
        require(
            self.micro_shards >= 0 and self.micro_shards & (self.micro_shards - 1) == 0,
            "train.micro_shards is a power of two, or 0",
            self.micro_shards,
        )
        if self.reproducible:
            self._check_micro_shards(self.micro_shards)

    def micro_shards_on(self, num_ranks: int) -> int | None:
        """Return the number of micro-shards of a run that begins on so many ranks.

        Raises:
            ConfigError: the global batch has not so many samples.
        """
        if not self.reproducible:
            return None
        found = self.micro_shards or 1 << (num_ranks - 1).bit_length()
        self._check_micro_shards(found)
        return found

    def _check_micro_shards(self, number: int) -> None:
        require(
            self.global_batch >= number,
            f"train.global_batch gives each of {number} micro-shards a sample, for "
            f"train.reproducible = true",
            self.global_batch,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TestConfig:
    """How the model is judged, on the test data."""

    __test__ = False  # a name that begins with Test is no test

    metric: str = "accuracy"
    """accuracy, loss, or "module:function" from (output, label) to one value per sample."""
    every_epochs: int = 1
    """Epochs between two tests; the last epoch is always tested."""

    def __post_init__(self) -> None:
        """Check the interval."""
        require(self.every_epochs >= 1, "test.every_epochs must be at least 1", self.every_epochs)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommConfig:
    """How gradients travel."""

    overlap: str = "auto"
    """When: on a thread, inline in the hooks, at the end of backward, or as the plan chooses."""
    bucket_size: str = "25 MiB"
    """Largest message. Bigger hides latency, smaller starts to travel earlier."""
    ranks_per_node: int = 0
    """Declares nodes on one host, of so many ranks each; 0 takes the machine as it is."""

    def __post_init__(self) -> None:
        """Check the words and the numbers."""
        require(
            self.overlap in OVERLAPS,
            f"comm.overlap is one of {', '.join(OVERLAPS)}",
            self.overlap,
        )
        require(self.ranks_per_node >= 0, "comm.ranks_per_node is 0 or more", self.ranks_per_node)
        try:
            positive = self.bucket_bytes > 0
        except ConfigError as error:
            raise ConfigError(f"comm.bucket_size: {error}") from None
        require(positive, "comm.bucket_size must be positive", self.bucket_size)

    @property
    def bucket_bytes(self) -> int:
        """``bucket_size`` as a number."""
        return parse_bytes(self.bucket_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is written down."""

    every_steps: int = 10
    """Steps between two records in metrics.jsonl, about: an epoch is cut into equal parts."""
    plots: bool = True
    """Draw plots/training.png at the end; needs matplotlib."""
    hash_every: int = 0
    """Steps between two hashes of weights and optimizer state in metrics.jsonl; 0 for none."""

    def __post_init__(self) -> None:
        """Check the interval."""
        require(self.every_steps >= 1, "log.every_steps must be at least 1", self.every_steps)
        require(self.hash_every >= 0, "log.hash_every is 0 or more", self.hash_every)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run."""

    name: str = "run"
    """Name of the run."""
    output_dir: str = ""
    """Folder that the run writes into, which must be new; when empty, runs/NAME."""
    seed: int = 0
    """Fixes the first weights and the order of the samples."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    train: TrainingConfig = field(default_factory=TrainingConfig)
    test: TestConfig = field(default_factory=TestConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    comm: CommConfig = field(default_factory=CommConfig)
    log: LogConfig = field(default_factory=LogConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    stop: StopConfig = field(default_factory=StopConfig)

    def __post_init__(self) -> None:
        """Check name and seed, and what goes together."""
        require(
            self.name != "" and self.name == Path(self.name).name and self.name not in {".", ".."},
            "name is a plain word, the name of a folder",
            self.name,
        )
        require(0 <= self.seed < 2**63, "seed is between 0 and 2^63 - 1", self.seed)
        require(
            not self.train.reproducible or self.data.on_corrupt == "raise",
            "data.on_corrupt is raise for train.reproducible = true: what is left out would move "
            "the samples of a rank",
            self.data.on_corrupt,
        )
        require(
            not (self.sync.is_local and self.train.reproducible),
            "sync.method is synchronous for train.reproducible = true, as what a rank learns by "
            "itself depends on the number of ranks: leave one of them out",
            self.sync.method,
        )
        require(
            not self.sync.is_local or self.data.on_corrupt == "raise",
            "data.on_corrupt is raise for a local sync.method, whose ranks do not speak in every "
            "step: repair the data with hpctrain data, or set sync.method = synchronous",
            self.data.on_corrupt,
        )

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.output_dir) if self.output_dir else Path("runs") / self.name
