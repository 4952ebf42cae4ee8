"""Configuration of checkpoints and of stopping: two tables."""

from dataclasses import dataclass

from hpctrain.core.errors import ConfigError
from hpctrain.core.units import parse_seconds


def require(ok: bool, rule: str, value: object) -> None:  # noqa: FBT001 - reads as a sentence
    """Raise a ``ConfigError`` with ``rule`` and ``value`` unless ``ok``."""
    if not ok:
        raise ConfigError(f"{rule}, got {value!r}")


def _seconds(key: str, text: str) -> float | None:
    """Read a time; None for an empty text."""
    try:
        return parse_seconds(text) if text else None
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """What is saved while a run goes on, in checkpoints/ of the run directory."""

    every: str | int = "10min"
    """Steps between two checkpoints, a time such as "10min", auto by their cost and mtbf, or none:
    then only a stop and the end of the run save."""
    keep: int = 2
    """Newest checkpoints that stay."""
    keep_best: int = 0
    """Checkpoints of the best tests that stay besides; a metric of the user's own grows."""
    mtbf: str = ""
    """Mean time between failures of the whole job, such as "20h"; auto needs it."""
    background: bool = True
    """Write while training goes on; else training waits."""
    resume: str = "never"
    """auto goes on with the run in output_dir if there is one, as --resume does."""

    def __post_init__(self) -> None:
        """Check the words and the numbers."""
        require(
            isinstance(self.every, str) or self.every >= 1,
            "checkpoint.every is at least 1 step",
            self.every,
        )
        if isinstance(self.every, str) and self.every not in ("none", "auto"):
            _seconds("checkpoint.every", self.every)
        require(self.keep >= 1, "checkpoint.keep must be at least 1", self.keep)
        require(self.keep_best >= 0, "checkpoint.keep_best is 0 or more", self.keep_best)
        require(
            self.every != "auto" or self.mtbf != "",
            "checkpoint.mtbf must be set for every = auto",
            self.mtbf,
        )
        require(
            self.resume in ("never", "auto"), "checkpoint.resume is never or auto", self.resume
        )
        _seconds("checkpoint.mtbf", self.mtbf)

    @property
    def mtbf_s(self) -> float | None:
        """``mtbf`` in seconds; None where it is not known."""
        return _seconds("checkpoint.mtbf", self.mtbf)


@dataclass(frozen=True, kw_only=True, slots=True)
class StopConfig:
    """When a run saves its state and ends with code 85, to go on with --resume."""

    after: str = ""
    """Budget of time, such as "11h50min", from the start of each part of the run."""
    margin: str = "2min"
    """Time before the end of a Slurm job at which to stop, where Slurm tells the end; at most a
    tenth of the job."""

    def __post_init__(self) -> None:
        """Check the times."""
        _seconds("stop.after", self.after)
        _seconds("stop.margin", self.margin)

    @property
    def after_s(self) -> float | None:
        """``after`` in seconds; None without a budget."""
        return _seconds("stop.after", self.after)

    @property
    def margin_s(self) -> float:
        """``margin`` in seconds."""
        return _seconds("stop.margin", self.margin) or 0.0
