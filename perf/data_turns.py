"""Measurement of a method: an epoch, or its beginning, with times and checks."""

import gc
import resource
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Self

import numpy as np
from data_methods import Kind, Method
from numpy.typing import NDArray

TOUCH_BYTES = 4096
"""Between the bytes of a sample that every turn reads: one on every page."""
START = 0.25
"""Part of the time limit that does not count where an epoch is not read to its end."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Times, bytes and samples of epochs, or of the part that was read."""

    num_bytes: int
    seconds: float
    cpu_seconds: float
    """Of this process, all its threads, and its children."""
    part: float
    """Of an epoch that was read, 1 for all."""

    def __add__(self, other: Self) -> Self:
        """Return the sum of two measurements."""
        return type(self)(
            self.num_bytes + other.num_bytes,
            self.seconds + other.seconds,
            self.cpu_seconds + other.cpu_seconds,
            min(self.part, other.part),
        )

    @property
    def rate(self) -> float:
        """MB per second."""
        return self.num_bytes / self.seconds / 1e6

    @property
    def cpu_rate(self) -> float:
        """MB per second of CPU time."""
        return self.num_bytes / self.cpu_seconds / 1e6


class Truth:
    """Expected bytes of every sample, for the check of delivered samples."""

    def __init__(self, kind: Kind, samples: NDArray[np.uint8]) -> None:
        """Read one byte of every page."""
        self.kind = kind
        self.touched = np.ascontiguousarray(_touched(samples))


def take_turn(method: Method, truth: Truth, limit_s: float, at_least_s: float = 0.0) -> Turn:
    """Read epochs until ``at_least_s`` have passed, each at most for about ``limit_s``.

    Raises:
        ValueError: a sample was delivered twice or not at all, or has wrong values.
    """
    gc.collect()
    turn = _read_epoch(method, truth, limit_s)
    while turn.seconds < at_least_s:
        turn += _read_epoch(method, truth, limit_s)
    return turn


def check(method: Method, samples: NDArray[np.uint8], limit_s: float) -> None:
    """Compare every byte of an epoch with the samples, for at most about ``limit_s``.

    Raises:
        ValueError: a sample has wrong values.
    """
    method.prepare()
    start = time.perf_counter()
    with closing(method.epoch()) as batches:
        for x, y in batches:
            if not np.array_equal(x.numpy(), samples[y.numpy()]):
                raise ValueError(
                    f"{method.name} must deliver the samples that were written, but did not"
                )
            if time.perf_counter() - start > limit_s and not method.whole:
                break


def _read_epoch(method: Method, truth: Truth, limit_s: float) -> Turn:
    """Read an epoch, for at most about ``limit_s`` unless the method needs complete epochs.

    The measured time includes the end of the workers, and a copy of the labels and of one byte on
    every page of the samples. Of an incomplete epoch the first part is not measured, because
    methods fill a shuffle buffer in that time.
    """
    method.prepare()
    labels = np.full(method.kind.num_samples, -1)
    touched = np.empty_like(truth.touched)
    limit_s = float("inf") if method.whole else limit_s
    begin = middle = _Mark.now(0)
    done = 0
    with closing(method.epoch()) as batches:
        for x, y in batches:
            stop = done + len(y)
            labels[done:stop] = y.numpy()
            touched[done:stop] = _touched(x.numpy())
            done = stop
            del x, y  # a method may reuse the memory of the batch
            elapsed_s = time.perf_counter() - begin.seconds
            if elapsed_s > START * limit_s and middle is begin:
                middle = _Mark.now(done)
            elif elapsed_s > limit_s:
                break
    end = _Mark.now(done)
    part = done / method.kind.num_samples
    once = len(np.unique(labels[:done])) == done
    same = np.array_equal(touched[:done], truth.touched[labels[:done]])
    if not (once and same and (part == 1 or end.seconds - begin.seconds > limit_s)):
        raise ValueError(f"{method.name} must deliver the samples that were written, but did not")
    start = begin if part == 1 else middle
    num_bytes = (end.done - start.done) * method.kind.sample_bytes
    return Turn(num_bytes, end.seconds - start.seconds, end.cpu_seconds - start.cpu_seconds, part)


def _touched(samples: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return samples.reshape(len(samples), -1)[:, ::TOUCH_BYTES]


@dataclass(frozen=True, slots=True)
class _Mark:
    """Readings of the clocks after a number of samples."""

    done: int
    seconds: float
    cpu_seconds: float

    @classmethod
    def now(cls, done: int) -> Self:
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds = time.process_time() + children.ru_utime + children.ru_stime
        return cls(done, time.perf_counter(), cpu_seconds)
