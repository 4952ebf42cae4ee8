"""Table ``[sync]`` of a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from hpctrain.core.checks import (
    AtLeast0,
    Bounds,
    CheckedFields,
    Count,
    Fraction,
    Number,
    require,
)
from hpctrain.core.config import COMPRESSIONS

SYNCHRONOUS: Final = "synchronous"

_OTHER_KEYS = ("steps", "compression", "compression_args", "fraction", "proximal")


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig(CheckedFields):
    """When the ranks agree: in every step, or after steps of their own."""

    table: ClassVar = "sync"
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
    compression: Annotated[str, Bounds(names=COMPRESSIONS)] = "none"
    """How gradients cross between nodes, or what the replicas of a local method exchange: as they
    are (none), in 16 or 8 bits (fp16, bf16, int8), or by another codec of hpctrain guide
    compression. auto tries the first ones on the link and takes the fastest."""
    compression_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the codec, such as rank = 4 of power_sgd."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of a local method, such as state = "average"; post_local_sgd also takes
    start_epochs, and staged_sgd warmup_epochs and cooldown_epochs, a tenth of the run each. Of
    downpour n_push, n_fetch and rate, of async staleness_aware; of all three curvature."""
    staleness: Count = 2
    """Of ssp: steps that a rank may be ahead of the slowest one. Of async as well, of downpour
    pushes."""
    fraction: Fraction = 1.0
    """Of a local method: part of the ranks, at most 1 and at least one of them, that is drawn for
    each round by the seed of the run. The others leave its steps out."""
    proximal: AtLeast0 = 0.0
    """Of a local method: mu of FedProx's term mu/2 ||w - w_round||^2, which holds local steps near
    the model that the round has begun with; 0 for none."""

    def check(self) -> None:
        """Raise ``ConfigError`` if the method does not support a key."""
        method, args = self.method, dict(self.args)
        require(
            (self.fraction == 1 and not self.proximal)
            or (self.is_local and not self.is_async and method != "staged_sgd"),
            f"sync.fraction and sync.proximal are for local_sgd, post_local_sgd, "
            f"hierarchical_local_sgd and diloco, not for sync.method = {method}: leave them "
            f"out, or choose another method",
            {"sync.fraction": self.fraction, "sync.proximal": self.proximal},
        )
        require(
            not (method == "staged_sgd" and self.steps == "auto"),
            "sync.steps must be a number with sync.method = staged_sgd, which changes it by the "
            "loss",
            self.steps,
        )
        keys = [name for name in _OTHER_KEYS if name in args]
        names = ", ".join(_OTHER_KEYS)
        require(not keys, f"sync.args must not have {names}: write them in [sync]", keys)
        require(
            self.is_async or "seed" not in args,
            "sync.args must not have a seed, which is that of the run: leave it out, and set seed",
            args.get("seed"),
        )
        require(
            self.is_local or not args,
            f"sync.args are for a local method, but sync.method is {SYNCHRONOUS}: leave them out, "
            f"or choose another method",
            args,
        )
        if self.is_async:
            require(
                self.compression == "none",
                f"sync.compression must be none with sync.method = {method}, which sends "
                f"uncompressed gradients: leave it out",
                self.compression,
            )
            require(
                not {"servers", "warmup_steps", "most_ahead"} & args.keys(),
                "sync.args must not have servers and warmup_steps, as all ranks serve and work, "
                "nor most_ahead, which is sync.staleness: leave them out",
                args,
            )

    @property
    def is_async(self) -> bool:
        """Whether parameter servers apply gradients asynchronously."""
        return self.method in ("ssp", "downpour", "async")

    @property
    def is_local(self) -> bool:
        """Whether ranks take local steps."""
        return self.method != SYNCHRONOUS
