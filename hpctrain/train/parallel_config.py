"""Table ``[parallel]`` of a configuration: how one model is divided among ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal

from hpctrain.core.keys import Count, Number, Rule, Texts, require

if TYPE_CHECKING:
    from hpctrain.train.config import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How a model that one rank cannot hold is divided: hpctrain guide parallel."""

    tp: Number = 1
    """Ranks that divide the matrices of each layer (tensor parallel)."""
    pp: Number = 1
    """Ranks that divide the layers, as stages of a pipeline."""
    cp: Number = 1
    """Ranks that divide the sequence of each sample (context parallel)."""
    dp: Count = 0
    """Replicas, which learn from different samples; 0 for what the other axes leave."""
    zero: Annotated[int, Rule(least=0, below=4)] = 0
    """What replicas divide among them: nothing (0), the optimizer's state (1), gradients too (2),
    parameters too (3)."""
    offload: str = ""
    """Where zero keeps a rank's part: cpu, beside a device that calculates, or a folder on a disk
    of the node, for ranks on CPUs; when empty, where it is calculated."""
    sequence: bool = False
    """Whether tp ranks divide what lies between layers too, along the sequence."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Of the pipeline: as hpctrain guide parallel says; zbv is not there, as torch cannot test by
    it."""
    micro_batches: Count = 0
    """Parts in which a replica's samples go through the pipeline; 0 for twice pp."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What layers between the first and the last calculate once more in backward, to save memory:
    nothing, all but products of matrices (selective), or all (full)."""
    roles: Mapping[str, Any] = field(default_factory=dict)
    """How tp divides a module, by its name, such as "*.up" = "column"; when empty, what the
    model has as attribute parallel_roles."""
    layers: Texts = field(default_factory=list)
    """Names of the layers whose chain the model is, such as ["embedding", "blocks.*", "head"];
    when empty, what the model has as attribute parallel_layers."""

    def __post_init__(self) -> None:
        require(
            self.zero > 0 or not self.offload,
            "parallel.offload is of parts that replicas divide: set parallel.zero too",
            self.offload,
        )
        require(
            self.tp > 1 or not self.sequence,
            "parallel.sequence divides what tp ranks have between layers: set parallel.tp too",
            self.sequence,
        )
        require(
            not self.zero or self.schedule in ("gpipe", "1f1b"),
            "parallel.zero divides a rank's only stage, with parallel.schedule = gpipe or 1f1b: "
            "choose one of them, or leave zero out",
            self.schedule,
        )
        require(
            self.pp > 1 or (self.schedule == "1f1b" and not self.micro_batches),
            "parallel.schedule is 1f1b and parallel.micro_batches is 0 without a pipeline: set "
            "parallel.pp too",
            (self.schedule, self.micro_batches),
        )

    @property
    def divides(self) -> bool:
        """Whether ranks have parts of one model, or of its state."""
        return max(self.tp, self.pp, self.cp) > 1 or self.zero > 0

    def check(self, run: "RunConfig") -> None:
        """Raise ``ConfigError`` if a run asks for what a divided model cannot do."""
        recomputed = run.train.activation_checkpointing
        require(
            self.recompute == "none" or not recomputed,
            "train.activation_checkpointing is empty with parallel.recompute, which chooses "
            "layers by itself: leave one of them out",
            recomputed,
        )
        if not self.divides:
            return
        what = f"parallel.{self.describe()}"
        train, sync = run.train, run.sync
        refused = {
            "sync.method": (sync.method, "synchronous", "ranks have parts of one model"),
            "sync.compression": (sync.compression, "none", "gradients are summed by torch"),
            "train.reproducible": (train.reproducible, False, "sums depend on the layout"),
            "train.on_divergence": (train.on_divergence, "stop", "ranks have parts"),
            "train.compile": (train.compile, False, "layers talk to other ranks"),
            "train.ema": (train.ema, 0, "averages are kept of whole models"),
            "log.noise_scale": (run.log.noise_scale, False, "ranks see no gradient of a replica"),
        }
        for key, (value, wanted, why) in refused.items():
            require(
                value == wanted,
                f"{key} is {str(wanted).lower()} with {what}, as {why}: leave one of them out",
                value,
            )
        require(
            train.shard != "node",
            f"train.shard is none with {what}: parallel.zero = 1, 2 or 3 divides state instead",
            train.shard,
        )
        require(
            train.precision != "fp16",
            f"train.precision is fp32 or bf16 with {what}: set bf16, which needs no scale",
            train.precision,
        )
        require(
            self.pp == 1 or train.accumulate == 1,
            "train.accumulate is 1 with parallel.pp, whose micro-batches are such pieces: set "
            "parallel.micro_batches",
            train.accumulate,
        )

    def describe(self, replicas: int = 1) -> str:
        """Say which axes there are, such as ``dp=2 x tp=2 x zero=1``."""
        axes = {"dp": replicas, "pp": self.pp, "cp": self.cp, "tp": self.tp}
        words = [f"{name}={size}" for name, size in axes.items() if size > 1]
        return " x ".join([*words, f"zero={self.zero}"] if self.zero else words)
