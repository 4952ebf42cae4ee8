"""Table ``[checkpoint]`` of a configuration."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from hpctrain.core.checks import CheckedFields, Count, Number, Time, require


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(CheckedFields):
    """What is saved while a run goes on, in checkpoints/ of the run directory."""

    table: ClassVar = "checkpoint"
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

    def check(self) -> None:
        """Raise ``ConfigError`` if keys contradict each other."""
        require(
            self.every != "auto" or self.mtbf != "",
            "checkpoint.mtbf must be set for every = auto",
            self.mtbf,
        )
