"""Table ``[parallel]`` of a configuration: division of a model among ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from hpctrain.core.checks import Bounds, CheckedFields, Count, Number, Texts, require


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig(CheckedFields):
    """How a model that one rank cannot hold is divided: hpctrain guide parallel."""

    table: ClassVar = "parallel"
    tp: Number = 1
    """Ranks that divide the matrices of each layer (tensor parallel)."""
    pp: Number = 1
    """Ranks that divide the layers, as stages of a pipeline."""
    cp: Number = 1
    """Ranks that divide the sequence of each sample (context parallel)."""
    dp: Count = 0
    """Replicas, which learn from different samples; 0 for what the other axes leave."""
    zero: Annotated[int, Bounds(least=0, below=4)] = 0
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

    def check(self) -> None:
        """Raise ``ConfigError`` if keys contradict each other."""
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
        """Whether ranks divide one model or its state."""
        return max(self.tp, self.pp, self.cp) > 1 or self.zero > 0

    def describe(self, replicas: int = 1) -> str:
        """Return the axes, such as ``dp=2 x tp=2 x zero=1``."""
        axes = {"dp": replicas, "pp": self.pp, "cp": self.cp, "tp": self.tp}
        words = [f"{name}={size}" for name, size in axes.items() if size > 1]
        return " x ".join([*words, f"zero={self.zero}"] if self.zero else words)
