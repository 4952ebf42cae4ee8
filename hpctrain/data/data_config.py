"""Table ``[data]`` of a configuration."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

from hpctrain.core.checks import CheckedFields, Count, Decay, Number, Positive, require

WORKER_TIMEOUT_S = 300.0
"""Default time limit of a worker for a batch. It is shorter than HPCTRAIN_TIMEOUT, 600 s by
default, after which the ranks that wait for the rank of this worker fail."""


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
    """Order of the training samples: global, window, sequential, or auto, which chooses one of
    them by the sizes of the samples and of the data set."""
    transform: str = ""
    """Function "module:function" that changes a batch (a dict of tensors) after the batch is read;
    with per_sample, the function changes one sample."""
    test_transform: str = ""
    """Function for batches of test and validation data, or "none" to apply no function; when
    empty, transform is used."""
    per_sample: bool = False
    """Whether transform and test_transform take one sample at a time."""
    random: bool = False
    """Whether transform takes a numpy.random.Generator, seeded for each sample, as second
    argument; needs per_sample. test_transform gets no generator. With workers = 0, a transform
    that uses the global generators is an error, because the order of threads is undefined."""
    workers: Count = 0
    """Number of processes per rank that call transform; with 0, threads of the rank call it."""
    worker_timeout_s: Positive = WORKER_TIMEOUT_S
    """Seconds that a worker may take for a batch; inf for no limit. After that, all ranks end, and
    the error contains the stack of the worker."""
    prefetch: Number = 4
    """Number of batches that are read ahead."""
    split: str = ""
    """File written by hpctrain data split --by-label: each rank trains on one or several parts of
    the training data; when empty, each global batch is divided among the ranks."""
    validation: Decay = 0.0
    """Fraction of the training samples that is held out for validation; the seed determines these
    samples. Tests during training, test.patience and checkpoint.keep_best use them, and the test
    set is used once, at the end. With 0, the validation set of target is used instead, or the test
    set if target returns no validation set."""
    stage: str = ""
    """Folder on each node to which the training data are copied, or auto; when empty, they are not
    copied."""
    on_corrupt: Literal["raise", "skip"] = "raise"
    """Reaction to damaged samples: raise an error, or skip the samples on all ranks."""

    def check(self) -> None:
        """Raise ``ConfigError`` if keys contradict each other."""
        if self.random:
            require(
                self.per_sample,
                "data.random must be false without data.per_sample, because a generator belongs "
                "to one sample",
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
