"""Table ``[data]`` of a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hpctrain.core.checks import CheckedFields, Count, Decay, Number, Positive, require

WORKER_TIMEOUT_S = 300.0
"""Time limit of a worker for a batch; ranks that wait for it give up after 600 s."""


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
    """Field of a batch that the model is called with."""
    label: str = "y"
    """Field of a batch that the loss compares with the output of the model."""
    order: Literal["auto", "global", "window", "sequential"] = "auto"
    """Of the training samples: global, window, sequential, or auto by their size."""
    transform: str = ""
    """Function "module:function" that changes a batch, a dict of tensors, as it is read; of a
    sample, with per_sample."""
    test_transform: str = ""
    """The same for batches of the test: another function, none, or when empty transform."""
    per_sample: bool = False
    """Whether transform and test_transform take one sample at a time."""
    random: bool = False
    """Whether transform, with per_sample, takes a numpy.random.Generator of the sample as second
    argument; test_transform does not. In threads (workers = 0) the global generators are refused:
    their order is chance."""
    workers: Count = 0
    """Processes on each rank that transform; 0 does it in threads."""
    worker_timeout_s: Positive = WORKER_TIMEOUT_S
    """Seconds that a worker may take for a batch before all ranks end with its stack; inf for
    ever."""
    prefetch: Number = 4
    """Batches read ahead."""
    split: str = ""
    """File of hpctrain data split --by-label: each rank learns from its part of the training data,
    or from several; when empty, all ranks share all samples."""
    validation: Decay = 0.0
    """Part of the training samples, chosen by the seed, that is held out for validation: tests
    during training, test.patience and checkpoint.keep_best use it, and the test set is used once,
    at the end. 0 uses the validation set of target, or else the test set, for all of them."""
    stage: str = ""
    """Folder on each node to copy the training data to, or auto; when empty, none is copied."""
    on_corrupt: Literal["raise", "skip"] = "raise"
    """Damaged samples are an error (raise), or left out by all ranks together (skip)."""

    def check(self) -> None:
        """Raise ``ConfigError`` if keys contradict each other."""
        if self.random:
            require(
                self.per_sample,
                "data.random gives each sample a generator: set data.per_sample = true too",
                self.random,
            )
            require(
                bool(self.test_transform),
                "data.random changes training samples at random, but tests use data.transform "
                "too: set data.test_transform to a function without a generator, or to none",
                self.random,
            )
        for name in ("split", "stage"):
            require(
                not (self.validation and getattr(self, name)),
                f"data.validation must be 0 with data.{name}, which uses a data set as it was "
                f"packed: hold samples out by hpctrain data split, and return that set from "
                f"data.target, as the second of three",
                self.validation,
            )
