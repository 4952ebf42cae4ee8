"""Tables ``[optimizer]`` and ``[schedule]`` of a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from hpctrain.core.checks import (
    AtLeast0,
    Bounds,
    CheckedFields,
    Count,
    Positive,
    checked,
    require,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(CheckedFields):
    """The optimizer."""

    table: ClassVar = "optimizer"
    name: str = "SGD"
    """Class in torch.optim, LARS or LAMB."""
    lr: Positive = 0.05
    """Peak learning rate, for the global batch, or schedule.base_batch: it depends on no ranks."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the class."""
    exempt_norms_and_biases: bool = False
    """Whether args.weight_decay, LARS and LAMB leave out norms and biases (one dimension)."""
    groups: Annotated[list[dict[str, Any]], Bounds(each=dict)] = field(default_factory=list)
    """Tables of other arguments, such as lr, for the parameters whose names match: match =
    "*.bias", or a list of such patterns. The first that matches counts."""

    def check(self) -> None:
        """Raise ``ConfigError`` if arguments contradict keys, or a group is not valid."""
        require(
            not {"lr", "params"} & {*self.args},
            "optimizer.args must not have lr or params; set optimizer.lr, and leave params out",
            dict(self.args),
        )
        for group in self.groups:
            checked("optimizer.groups: lr", group.get("lr", self.lr), Positive)
            match = group.get("match")
            texts = match if isinstance(match, list) else [match]
            require(
                bool(texts) and all(isinstance(text, str) for text in texts),
                'optimizer.groups must have tables with match = "pattern" or a list of patterns',
                group,
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig(CheckedFields):
    """The learning rate of each step."""

    table: ClassVar = "schedule"
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
