"""Table ``[data]`` of a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hpctrain.core.checks import CheckedFields, Count, Decay, Number, Positive, require

WORKER_TIMEOUT_S = 300.0
"""Default time limit of a worker for a batch. It is shorter than the 600 s after which the other
ranks fail while they wait for the rank of this worker (HPCTRAIN_TIMEOUT)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig(CheckedFields):
    """The data sets."""

    table: ClassVar = "data"
    target: str = ""
    """Function "module:function" that takes a communicator and args and returns (train, test) or
    (train, validation, test)."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the target."""
    input: str = "x"
    """Field of a batch that is passed to the model."""
    label: str = "y"
    """Field of a batch that the loss compares with the output of the model."""
    order: Literal["auto", "global", "window", "sequential"] = "auto"
    """Order of the training samples: global, window, sequential, or auto, which chooses by their
    size."""
    transform: str = ""
    """Function "module:function" that changes a batch (a dict of tensors) after it is read, or a
    sample with per_sample."""
    test_transform: str = ""
    """Function for batches of test and validation data; none applies no function; when empty,
    transform is used."""
    per_sample: bool = False
    """Whether transform and test_transform take one sample at a time."""
    random: bool = False
    """Whether transform takes a numpy.random.Generator, seeded for each sample, as second
    argument; needs per_sample. test_transform gets no generator. With workers = 0, a transform
    that uses the global generators is an error, because threads would use them in random order."""
    workers: Count = 0
    """Processes on each rank that call transform; 0 calls it in threads."""
    worker_timeout_s: Positive = WORKER_TIMEOUT_S
    """Seconds that a worker may take for a batch before all ranks end and print its stack; inf for
    no limit."""
    prefetch: Number = 4
    """Number of batches that are read ahead."""
    split: str = ""
    """File written by hpctrain data split --by-label: each rank trains on one or several parts of
    the training data; when empty, all ranks share all samples."""
    validation: Decay = 0.0
    """Fraction of the training samples, chosen by the seed, that is held out for validation: tests
    during training, test.patience and checkpoint.keep_best use these samples, and the test set is
    used once, at the end. With 0 they use the validation set of target, or else the test set."""
    stage: str = ""
    """Folder on each node to which the training data are copied, or auto; when empty, they are not
    copied."""
    on_corrupt: Literal["raise", "skip"] = "raise"
    """Damaged samples raise an error (raise), or all ranks skip them (skip)."""

    def check(self) -> None:
        """Raise ``ConfigError`` if keys contradict each other."""
        if self.random:
            require(
                self.per_sample,
                "data.random must be false without data.per_sample, because each sample has a "
                "generator",
                self.random,
                "set data.per_sample = true too",
            )
            require(
                bool(self.test_transform),
                "data.test_transform must be set with data.random, because tests would use the "
                "random data.transform",
                self.test_transform,
                "set data.test_transform to a function without a generator, or to none",
            )
        for name in ("split", "stage"):
            require(
                not (self.validation and getattr(self, name)),
                f"data.validation must be 0 with data.{name}, which needs the packed data set "
                f"unchanged",
                self.validation,
                "hold samples out with hpctrain data split, and return that data set from "
                "data.target as the second of three",
            )
