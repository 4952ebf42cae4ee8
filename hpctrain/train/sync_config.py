"""Configuration of the ranks' agreement: a table."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hpctrain.train.checkpoint_config import require

SYNCHRONOUS = "synchronous"
METHODS = (
    SYNCHRONOUS,
    "local_sgd",
    "post_local_sgd",
    "hierarchical_local_sgd",
    "diloco",
    "staged_sgd",
)
COMPRESSIONS = ("none", "fp16", "bf16")


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig:
    """When the ranks agree: in every step, or after steps of their own."""

    method: str = SYNCHRONOUS
    """Gradients are averaged in every step (synchronous), or ranks take steps of their own by
    local_sgd, post_local_sgd, hierarchical_local_sgd, diloco or staged_sgd: then optimizer.lr
    belongs to a rank's share of the batch."""
    steps: str | int = 8
    """Of a local method: steps between two averagings over all ranks, or auto: measured, so that
    averaging takes at most args.share (0.1) of the time."""
    compression: str = "none"
    """Of a local method: what travels does so as it is (none), or in 16 bits (fp16, bf16)."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of a local method, such as state = "average"; post_local_sgd also takes
    start_epochs, and staged_sgd warmup_epochs and cooldown_epochs, a tenth of the run each."""

    def __post_init__(self) -> None:
        """Check the words and the numbers, and what goes together."""
        require(self.method in METHODS, f"sync.method is one of {', '.join(METHODS)}", self.method)
        require(
            self.steps == "auto" or (isinstance(self.steps, int) and self.steps >= 1),
            "sync.steps is at least 1, or auto",
            self.steps,
        )
        require(
            not (self.method == "staged_sgd" and self.steps == "auto"),
            "sync.steps is a number for sync.method = staged_sgd, which changes it by the loss",
            self.steps,
        )
        require(
            self.compression in COMPRESSIONS,
            f"sync.compression is one of {', '.join(COMPRESSIONS)}",
            self.compression,
        )
        keys = {"steps", "compression"} & self.args.keys()
        require(
            not keys,
            "sync.args has the other arguments of a method: write steps and compression beside it",
            sorted(keys),
        )
        require(
            self.is_local or (self.compression == "none" and not self.args),
            f"sync.compression and sync.args are for a local method, and sync.method is "
            f"{SYNCHRONOUS}: leave them out, or choose another method",
            {"compression": self.compression, "args": dict(self.args)},
        )

    @property
    def is_local(self) -> bool:
        """Whether ranks take steps of their own."""
        return self.method != SYNCHRONOUS
