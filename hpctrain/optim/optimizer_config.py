"""Tables ``[optimizer]`` and ``[schedule]`` of a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from hpctrain.core.checks import AtLeast0, Bounds, CheckedFields, Count, Positive, checked, require


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig(CheckedFields):
    """The optimizer."""

    table: ClassVar = "optimizer"
    name: str = "SGD"
    """Class in torch.optim, LARS or LAMB."""
    lr: Positive = 0.05
    """Peak learning rate for the global batch, or for schedule.base_batch if set; independent of
    the number of ranks."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Other keyword arguments of the class."""
    exempt_norms_and_biases: bool = False
    """Exclude norms and biases (parameters of one dimension) from args.weight_decay and from the
    layer-wise rates of LARS and LAMB."""
    groups: Annotated[list[dict[str, Any]], Bounds(each=dict)] = field(default_factory=list)
    """Tables with other arguments, such as lr, for the parameters whose names match the key match:
    a pattern, such as "*.bias", or a list of patterns. The first table that matches is used."""

    def check(self) -> None:
        """Raise ``ConfigError`` if ``args`` has ``lr`` or ``params``, or a group is not valid."""
        require(
            not {"lr", "params"} & {*self.args},
            "optimizer.args must not contain lr or params",
            dict(self.args),
            "set optimizer.lr, and omit params",
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
    """How the rate falls after the warm-up: constant, linear, cosine, poly or inverse_time."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the schedule. linear and cosine: final (default 0), the last rate
    divided by the peak. poly: power (default 2). inverse_time: decay (default 1); the last rate is
    peak / (1 + decay)."""
    warmup_epochs: AtLeast0 = 0.0
    """Number of epochs in which the rate rises linearly to its peak. It starts at zero, or at
    optimizer.lr if the peak is larger because of base_batch."""
    base_batch: Count = 0
    """Global batch for which optimizer.lr was chosen: the rate is scaled from base_batch to
    train.global_batch. With 0, the rate is not scaled."""
    scaling: Literal["linear", "square_root"] = "linear"
    """Factor of the rate with base_batch: train.global_batch / base_batch (linear, for SGD and
    LARS), or the square root of this ratio (square_root, for Adam and LAMB)."""
