"""Table ``[checkpoint]`` of a configuration."""

from dataclasses import dataclass
from typing import ClassVar, Literal

from hpctrain.core.checks import CheckedFields, Count, Number, Time, require

Files = Literal["node", "rank"]  # ranks of a node share a file, or each rank has a file


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig(CheckedFields):
    """Checkpoints of a run, in checkpoints/ of the run directory."""

    table: ClassVar = "checkpoint"
    every: Literal["auto", "none"] | Time | Number = "10min"
    """When to save: after a number of steps, after a time such as "10min", auto (a time computed
    from mtbf and the cost of a checkpoint), or none (only at a stop and at the end of the run)."""
    keep: Number = 2
    """Number of newest checkpoints that are kept."""
    keep_best: Count = 0
    """Number of checkpoints that are kept in addition, because their value of the first
    test.metric is best; at least 1 with test.patience."""
    mtbf: Time = ""
    """Mean time between failures of the whole job, such as "20h"; needed by every = auto."""
    background: bool = True
    """Write checkpoints in the background; if false, training waits for each write."""
    files: Files = "node"
    """Write one file per node, or one per rank."""
    resume: Literal["never", "auto"] = "never"
    """auto resumes the run in output_dir if there is one, as --resume does."""

    def check(self) -> None:
        """Raise ``ConfigError`` if keys contradict each other."""
        require(
            self.every != "auto" or self.mtbf != "",
            "checkpoint.mtbf must be set with checkpoint.every = auto",
            self.mtbf,
            "set it to the mean time between failures of the job, such as 20h",
        )
