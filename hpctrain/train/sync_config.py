"""Table ``[sync]`` of a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, Literal

from hpctrain.core.checks import AtLeast0, Bounds, CheckedFields, Count, Fraction, Number, require
from hpctrain.core.config import COMPRESSIONS

SYNCHRONOUS: Final = "synchronous"

_OTHER_KEYS = ("steps", "compression", "compression_args", "fraction", "proximal")


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncConfig(CheckedFields):
    """When ranks average: gradients in every step, or weights after several local steps."""

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
    """Average gradients in every step (synchronous); or take local steps and average weights
    (local_sgd, post_local_sgd, hierarchical_local_sgd, diloco, staged_sgd), where optimizer.lr is
    for a rank's share of the batch; or let parameter servers apply gradients asynchronously, with
    a bound on the staleness (ssp), every few steps (downpour) or at once (async)."""
    steps: Literal["auto"] | Number = 8
    """For a local method: number of steps between two averagings over all ranks. auto measures and
    chooses the number, so that averaging takes at most the fraction args.share (0.1) of the
    time."""
    compression: Annotated[str, Bounds(names=COMPRESSIONS)] = "none"
    """Codec that compresses gradients sent between nodes, or the data that replicas of a local
    method exchange: none, fp16, bf16, int8, or another codec of hpctrain guide compression. auto
    measures none, bf16 and int8 on the network and uses the fastest of these."""
    compression_args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the codec, such as rank = 4 for power_sgd."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Other arguments of the method. Local methods: such as state = "average". post_local_sgd:
    also start_epochs. staged_sgd: also warmup_epochs and cooldown_epochs, by default a tenth of
    the run each. downpour: n_push, n_fetch, rate and curvature. async: staleness_aware and
    curvature. ssp: curvature."""
    staleness: Count = 2
    """With ssp and async: largest number of steps by which a rank may be ahead of the slowest
    rank. With downpour: largest number of pushes."""
    fraction: Fraction = 1.0
    """For a local method: fraction of the ranks, at least one rank, that train in a round. These
    ranks are drawn for each round with the seed of the run; the other ranks skip the steps of the
    round."""
    proximal: AtLeast0 = 0.0
    """For a local method: mu of FedProx's term mu/2 ||w - w_round||^2, which keeps the weights w
    near w_round, the weights at the start of the round; 0 for none."""

    def check(self) -> None:
        """Raise ``ConfigError`` if the method does not support a key."""
        method, args = self.method, dict(self.args)
        require(
            (self.fraction == 1 and not self.proximal)
            or (self.is_local and not self.is_async and method != "staged_sgd"),
            f"sync.fraction must be 1 and sync.proximal 0 with sync.method = {method}",
            {"sync.fraction": self.fraction, "sync.proximal": self.proximal},
            "omit them, or choose local_sgd, post_local_sgd, hierarchical_local_sgd or diloco",
        )
        require(
            not (method == "staged_sgd" and self.steps == "auto"),
            "sync.steps must be a number with sync.method = staged_sgd, which changes the number "
            "by the loss",
            self.steps,
            "set the number of the first stage",
        )
        keys = [name for name in _OTHER_KEYS if name in args]
        names = ", ".join(_OTHER_KEYS)
        require(not keys, f"sync.args must not have {names}", keys, "write them in [sync]")
        require(
            self.is_async or "seed" not in args,
            "sync.args must not have a seed, because the seed of the run is used",
            args.get("seed"),
            "omit it, and set seed",
        )
        require(
            self.is_local or not args,
            f"sync.args must be empty with sync.method = {SYNCHRONOUS}",
            args,
            "omit them, or choose another method",
        )
        if self.is_async:
            require(
                self.compression == "none",
                f"sync.compression must be none with sync.method = {method}, which sends "
                f"uncompressed gradients",
                self.compression,
                "omit it",
            )
            require(
                not {"servers", "warmup_steps", "most_ahead"} & args.keys(),
                "sync.args must not have servers, warmup_steps or most_ahead, because all ranks "
                "are workers",
                args,
                "omit them; sync.staleness sets most_ahead",
            )

    @property
    def is_async(self) -> bool:
        """Whether parameter servers apply gradients asynchronously."""
        return self.method in ("ssp", "downpour", "async")

    @property
    def is_local(self) -> bool:
        """Whether ranks take local steps."""
        return self.method != SYNCHRONOUS
