"""Configuration of a run: one frozen dataclass per table of the TOML file.

A field is a key: its type says what it takes, the string below it is its sentence.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from hpctrain.core.config import COMPRESSIONS
from hpctrain.core.errors import ConfigError
from hpctrain.core.keys import AtLeast0, Count, Number, Positive, Rule, Texts, Time, require
from hpctrain.core.units import parse_bytes
from hpctrain.train.parallel_config import ParallelConfig

SYNCHRONOUS: Final = "synchronous"


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The network."""

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
    order: Literal["auto", "global", "window", "sequential"] = "auto"
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
    workers: Count = 0
    """Processes on each rank that transform; 0 does it in threads."""
    worker_timeout_s: Positive = 300.0
    """Seconds that a worker may take for a batch before all ranks end with its stack; inf for
    ever."""
    prefetch: Number = 4
    """Batches read ahead."""
    split: str = ""
    """File of hpctrain data split --by-label: each rank learns from its part of the training data,
    or from several; when empty, all ranks share all samples."""
    validation: Annotated[float, Rule(least=0, below=1)] = 0.0
    """Part of the training samples, chosen by the seed, that is held out for validation: tests
    during training, test.patience and checkpoint.keep_best use it, and the test set is used once,
    at the end. 0 uses the test set for all of them."""
    stage: str = ""
    """Folder on each node to copy the training data to, or auto; when empty, none is copied."""
    on_corrupt: Literal["raise", "skip"] = "raise"
    """Damaged samples are an error (raise), or left out by all ranks together (skip)."""

    def __post_init__(self) -> None:
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
        for name in ("split", "stage"):
            require(
                not (self.validation and getattr(self, name)),
                f"data.validation must be 0 with data.{name}, which takes a data set as it was "
                f"packed: hold samples out by hpctrain data split, and return that set as the "
                f"second one",
                self.validation,
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
    """Class in torch.optim, LARS or LAMB."""
    lr: Positive = 0.05
    """Peak learning rate, for the global batch, or schedule.base_batch: it depends on no ranks."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the class."""
    exempt_norms_and_biases: bool = False
    """Whether args.weight_decay, LARS and LAMB leave out norms and biases (one dimension)."""
    groups: Annotated[list[dict[str, Any]], Rule(each=dict)] = field(default_factory=list)
    """Tables of arguments of their own, such as lr, for the parameters whose names match: match =
    "*.bias", or a list of such patterns. The first that matches counts."""

    def __post_init__(self) -> None:
        require(
            not {"lr", "params"} & {*self.args},
            "optimizer.args has the other arguments: the rate is optimizer.lr, the parameters are "
            "those of the model",
            dict(self.args),
        )
        for group in self.groups:
            lr = group.get("lr", self.lr)
            require(
                isinstance(lr, float | int) and lr > 0,
                "optimizer.groups have an lr above 0, or none",
                group,
            )
            match = group.get("match")
            texts = match if isinstance(match, list) else [match]
            require(
                bool(texts) and all(isinstance(text, str) for text in texts),
                'optimizer.groups has tables with match = "pattern", or a list of patterns',
                group,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """How the learning rate changes from step to step."""

    name: str = "cosine"
    """How it falls after the warm-up: one of constant, linear, cosine, poly, inverse_time."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments: linear and cosine take final, the last rate over the peak (0), poly power
    (2), inverse_time decay (1): the last rate is the peak over 1 + decay."""
    warmup_epochs: AtLeast0 = 0.0
    """Epochs in which the rate rises linearly: from zero, or from optimizer.lr if scaled up."""
    base_batch: Count = 0
    """Global batch that optimizer.lr is for: it is scaled to train.global_batch; 0 leaves it."""
    scaling: Literal["linear", "square_root"] = "linear"
    """By the ratio of the batches (linear, for SGD and LARS) or its root (for Adam and LAMB)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """How long, in which batches, and how a step is calculated."""

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
    ema: Annotated[float, Rule(least=0, below=1)] = 0.0
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
    lowered_rate: Annotated[float, Rule(above=0, below=1)] = 0.1
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

    def __post_init__(self) -> None:
        require(
            self.micro_shards & (self.micro_shards - 1) == 0,
            "train.micro_shards is a power of two, or 0",
            self.micro_shards,
        )
        require(
            self.shard != "node" or not self.reproducible,
            "train.shard is none for train.reproducible = true, which sums gradients by a rule of "
            "its own: leave one of them out",
            self.shard,
        )
        require(
            self.device in ("auto", "cpu") or not (self.reproducible or self.shard == "node"),
            "train.device is cpu for train.reproducible = true and for train.shard = node: leave "
            "one of them out, or divide the state on cards by parallel.zero = 1",
            self.device,
        )
        require(
            self.master_dtype == "none" or self.shard == "node",
            "train.master_dtype is none, or fp32 for train.shard = node: set that too",
            self.master_dtype,
        )
        if self.reproducible:
            self._check_micro_shards(self.micro_shards)

    def micro_shards_on(self, num_ranks: int) -> int | None:
        """Return the number of micro-shards of a run that begins on so many ranks.

        Raises ``ConfigError``: the global batch has not so many samples.
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

    def __post_init__(self) -> None:
        names = [name.rpartition(":")[2] for name in self.metrics]
        require(0 < len(names) == len(set(names)), "test.metric has names, each once", self.metric)

    @property
    def metrics(self) -> list[str]:
        """All metrics; the first one judges."""
        return [self.metric] if isinstance(self.metric, str) else self.metric


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """When the ranks agree: in every step, or after steps of their own."""

    method: Literal[
        "synchronous",
        "local_sgd",
        "post_local_sgd",
        "hierarchical_local_sgd",
        "diloco",
        "staged_sgd",
        "ssp",
        "downpour",
        "async",
    ] = SYNCHRONOUS
    """Gradients are averaged in every step (synchronous), or ranks take steps of their own by
    local_sgd, post_local_sgd, hierarchical_local_sgd, diloco or staged_sgd: then optimizer.lr
    belongs to a rank's share of the batch. Or parameter servers on all ranks step by gradients as
    they come: within a bound (ssp), rarely (downpour) or at once (async)."""
    steps: Literal["auto"] | Number = 8
    """Of a local method: steps between two averagings over all ranks, or auto: measured, so that
    averaging takes at most args.share (0.1) of the time."""
    compression: Annotated[str, Rule(names=COMPRESSIONS)] = "none"
    """How gradients cross between nodes, or what the replicas of a local method exchange: as they
    are (none), in 16 or 8 bits (fp16, bf16, int8), or by another codec of hpctrain guide
    compression. auto tries the first ones on the link and takes the fastest."""
    compression_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the codec, such as rank = 4 of power_sgd."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of a local method, such as state = "average"; post_local_sgd also takes
    start_epochs, and staged_sgd warmup_epochs and cooldown_epochs, a tenth of the run each. Of
    downpour n_push, n_fetch and rate, of async staleness_aware; of all three curvature."""
    staleness: Annotated[int, Rule(least=0)] = 2
    """Of ssp: steps that a rank may be ahead of the slowest one. Of async as well, of downpour
    pushes."""
    fraction: Positive = 1.0
    """Of a local method: part of the ranks, at most 1 and at least one of them, that is drawn for
    each round by the seed of the run. The others leave its steps out."""
    proximal: AtLeast0 = 0.0
    """Of a local method: mu of FedProx's term mu/2 ||w - w_round||^2, which holds local steps near
    the model that the round has begun with; 0 for none."""

    def __post_init__(self) -> None:
        require(
            self.fraction <= 1,
            "sync.fraction is a part of the ranks, at most 1",
            self.fraction,
        )
        require(
            (self.fraction == 1 and not self.proximal)
            or (self.is_local and not self.is_async and self.method != "staged_sgd"),
            f"sync.fraction and sync.proximal are for local_sgd, post_local_sgd, "
            f"hierarchical_local_sgd and diloco, not for sync.method = {self.method}: leave them "
            f"out, or choose another method",
            {"sync.fraction": self.fraction, "sync.proximal": self.proximal},
        )
        require(
            not (self.method == "staged_sgd" and self.steps == "auto"),
            "sync.steps is a number for sync.method = staged_sgd, which changes it by the loss",
            self.steps,
        )
        beside = ("steps", "compression", "compression_args", "fraction", "proximal")
        keys = {*beside} & self.args.keys()
        require(
            not keys,
            f"sync.args has the other arguments of a method: write {', '.join(beside)} beside it",
            sorted(keys),
        )
        require(
            self.is_async or "seed" not in self.args,
            "sync.args has no seed, the run's seed draws: leave it out, and write seed above",
            self.args.get("seed"),
        )
        require(
            self.is_local or not self.args,
            f"sync.args are for a local method, and sync.method is {SYNCHRONOUS}: leave them out, "
            f"or choose another method",
            dict(self.args),
        )

        require(
            not (self.is_async and self.compression != "none"),
            f"sync.compression is none for sync.method = {self.method}, which sends gradients "
            f"as they are: leave it out",
            self.compression,
        )
        require(
            not (self.is_async and {"servers", "warmup_steps", "most_ahead"} & self.args.keys()),
            "sync.args has no servers and no warmup_steps, as all ranks serve and work, and "
            "sync.staleness stands for most_ahead: leave them out",
            dict(self.args),
        )

    @property
    def is_async(self) -> bool:
        """Whether parameter servers step by gradients as they come."""
        return self.method in ("ssp", "downpour", "async")

    @property
    def is_local(self) -> bool:
        """Whether ranks take steps of their own."""
        return self.method != SYNCHRONOUS


@dataclass(frozen=True, kw_only=True, slots=True)
class CommConfig:
    """How gradients travel."""

    overlap: Literal["auto", "thread", "inline", "end"] = "auto"
    """When: on a thread, inline in the hooks, at the end of backward, or as the plan chooses."""
    bucket_size: str = "25 MiB"
    """Largest message. Bigger hides latency, smaller starts to travel earlier."""
    ranks_per_node: Count = 0
    """Declares nodes on one host, of so many ranks each; 0 takes the machine as it is."""

    def __post_init__(self) -> None:
        try:
            positive = self.bucket_bytes > 0
        except ConfigError as error:
            raise ConfigError(f"comm.bucket_size: {error}") from None
        require(positive, "comm.bucket_size must be above 0", self.bucket_size)

    @property
    def bucket_bytes(self) -> int:
        """``bucket_size`` as a number."""
        return parse_bytes(self.bucket_size)


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is written down."""

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
    profile: Annotated[list[int], Rule(each=int)] = field(default_factory=list)
    """First and last step, counted from 1, of a Chrome trace in profile/ of the run directory,
    such as [20, 25]; when empty, none is written."""
    profile_ranks: Annotated[list[int], Rule(each=int)] = field(default_factory=lambda: [0])
    """Ranks that write one."""

    def __post_init__(self) -> None:
        steps = self.profile
        require(
            not steps or (len(steps) == 2 and 1 <= steps[0] <= steps[1]),
            "log.profile is the first and the last step, counted from 1",
            steps,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What is saved while a run goes on, in checkpoints/ of the run directory."""

    every: Literal["auto", "none"] | Time | Number = "10min"
    """Steps between two checkpoints, a time such as "10min", auto by their cost and mtbf, or none:
    then only a stop and the end of the run save."""
    keep: Number = 2
    """Newest checkpoints that stay."""
    keep_best: Count = 0
    """Checkpoints of the best tests that stay besides, by the first test.metric; at least 1 with
    test.patience."""
    mtbf: Time = ""
    """Mean time between failures of the whole job, such as "20h"; auto needs it."""
    background: bool = True
    """Write while training goes on; else training waits."""
    resume: Literal["never", "auto"] = "never"
    """auto goes on with the run in output_dir if there is one, as --resume does."""

    def __post_init__(self) -> None:
        require(
            self.every != "auto" or self.mtbf != "",
            "checkpoint.mtbf must be set for every = auto",
            self.mtbf,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StopConfig:
    """When a run saves its state and ends with code 85, to go on with --resume."""

    after: Time = ""
    """Budget of time, such as "11h50min", from the start of each part of the run."""
    margin: Time = "2min"
    """Time before the end of a Slurm job at which to stop, where Slurm tells the end; at most a
    tenth of the job."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run."""

    name: str = "run"
    """Name of the run."""
    output_dir: str = ""
    """Folder that the run writes into, which must be new; when empty, runs/NAME."""
    seed: Annotated[int, Rule(least=0, below=2**63)] = 0
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

    def __post_init__(self) -> None:
        require(
            self.name != "" and self.name == Path(self.name).name and self.name not in {".", ".."},
            "name is a plain word, the name of a folder",
            self.name,
        )
        require(
            not self.train.reproducible or self.data.on_corrupt == "raise",
            "data.on_corrupt is raise for train.reproducible = true: what is left out would move "
            "the samples of a rank",
            self.data.on_corrupt,
        )
        self._check_calculation()
        self.parallel.check(self)
        require(
            not (self.sync.is_local and self.train.reproducible),
            "sync.method is synchronous for train.reproducible = true, as what a rank learns by "
            "itself depends on the number of ranks: leave one of them out",
            self.sync.method,
        )
        require(
            self.sync.compression == "none"
            or (self.train.shard != "node" and not self.train.reproducible),
            "sync.compression is none for train.shard = node and for train.reproducible = true, "
            "which send gradients as they are",
            self.sync.compression,
        )
        require(
            not self.sync.is_local or self.train.shard != "node",
            "train.shard is none for a local sync.method, whose ranks have parameters of their "
            "own: leave one of them out",
            self.train.shard,
        )
        require(
            not (self.sync.is_async and (self.train.clip_norm or self.train.clip_value)),
            f"train.clip_norm and train.clip_value are 0 for sync.method = {self.sync.method}, "
            f"whose servers step by gradients that ranks have not averaged: leave them out",
            (self.train.clip_norm, self.train.clip_value),
        )
        require(
            not self.sync.is_local or self.data.on_corrupt == "raise",
            "data.on_corrupt is raise for a local sync.method, whose ranks do not speak in every "
            "step: repair the data with hpctrain data, or set sync.method = synchronous",
            self.data.on_corrupt,
        )

    def _check_calculation(self) -> None:
        """Check what a step of this kind cannot do."""
        train = self.train
        require(
            not train.reproducible or train.accumulate == 1,
            "train.accumulate is 1 for train.reproducible = true, whose micro-shards are such "
            "pieces: set train.micro_shards",
            train.accumulate,
        )
        is_healed = train.on_divergence == "heal"
        require(
            not is_healed or (train.shard == "none" and train.check_replicas != "never"),
            "train.on_divergence is stop for train.shard = node or auto, where a node has one "
            "replica, and for train.check_replicas = never",
            train.on_divergence,
        )
        require(
            "rollback" not in (train.on_non_finite, train.on_spike)
            or not (self.sync.is_local or self.parallel.offload),
            "train.on_non_finite and train.on_spike are no rollback for a local sync.method, its "
            "ranks decide apart, and for parallel.offload, which spares the memory of a snapshot: "
            "take skip",
            (train.on_non_finite, train.on_spike),
        )
        require(
            train.on_spike == "none" or not self.sync.is_local,
            "train.on_spike is none for a local sync.method, whose ranks have their own losses: "
            "leave one of them out",
            train.on_spike,
        )
        is_plain = not train.reproducible and not self.sync.is_local
        require(
            is_plain or train.precision != "fp16",
            "train.precision is fp32 or bf16 for a local sync.method and for train.reproducible, "
            "as all ranks scale one loss together: set bf16, which needs no scale",
            train.precision,
        )
        require(
            not self.sync.is_local or train.ema == 0,
            "train.ema is 0 for a local sync.method, whose ranks have weights of their own to "
            "average: leave one of them out",
            train.ema,
        )

    @property
    def keep_best(self) -> int:
        """How many checkpoints of the best tests stay."""
        return max(self.checkpoint.keep_best, int(self.test.patience > 0))

    @property
    def directory(self) -> Path:
        """The run directory."""
        return Path(self.output_dir) if self.output_dir else Path("runs") / self.name
