"""Table ``[parallel]`` of a configuration: division of a model among ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from hpctrain.core.checks import Bounds, CheckedFields, Count, Number, Texts, require


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig(CheckedFields):
    """How a model that is too large for one rank is divided: hpctrain guide parallel."""

    table: ClassVar = "parallel"
    tp: Number = 1
    """Ranks that divide the matrices of each layer (tensor parallel)."""
    pp: Number = 1
    """Ranks that divide the layers, as stages of a pipeline."""
    cp: Number = 1
    """Ranks that divide the sequence of each sample (context parallel)."""
    dp: Count = 0
    """Number of replicas, which train on different samples; 0 divides the number of ranks by the
    other axes."""
    zero: Annotated[int, Bounds(least=0, below=4)] = 0
    """State that the replicas divide among themselves: none (0), the state of the optimizer (1),
    also the gradients (2), also the parameters (3)."""
    offload: str = ""
    """Where the state that zero divides is stored: cpu, for host memory of ranks with GPUs; a
    folder on a local disk, for ranks on CPUs; when empty, the memory of the device."""
    sequence: bool = False
    """Whether tp ranks also divide activations between layers, along the sequence."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble"] = "1f1b"
    """Schedule of the pipeline: hpctrain guide parallel. zbv is not supported, because torch
    cannot evaluate a model with this schedule."""
    micro_batches: Count = 0
    """Number of micro-batches into which the pipeline divides the samples of a replica; 0 for
    twice pp."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Operations that backward repeats, to save memory, in all layers except the first and the
    last: none, all but matrix products (selective), or all (full)."""
    roles: Mapping[str, Any] = field(default_factory=dict)
    """How tp divides modules, by patterns of their names, such as "*.up" = "column"; when empty,
    the attribute parallel_roles of the model."""
    layers: Texts = field(default_factory=list)
    """Names of the layers of the model in the order in which forward calls them, such as
    ["embedding", "blocks.*", "head"]; when empty, the attribute parallel_layers of the model."""

    def check(self) -> None:
        """Raise ``ConfigError`` if keys contradict each other."""
        require(
            self.zero > 0 or not self.offload,
            "parallel.offload must be empty with parallel.zero = 0, which divides no state",
            self.offload,
            "set parallel.zero too",
        )
        require(
            self.tp > 1 or not self.sequence,
            "parallel.sequence must be false with parallel.tp = 1",
            self.sequence,
            "set parallel.tp too",
        )
        require(
            not self.zero or self.schedule in ("gpipe", "1f1b"),
            "parallel.schedule must be gpipe or 1f1b with parallel.zero, which divides the "
            "only stage of a rank",
            self.schedule,
            "choose gpipe or 1f1b, or omit parallel.zero",
        )
        require(
            self.pp > 1 or (self.schedule == "1f1b" and not self.micro_batches),
            "parallel.schedule must be 1f1b and parallel.micro_batches 0 with parallel.pp = 1",
            (self.schedule, self.micro_batches),
            "set parallel.pp too",
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
