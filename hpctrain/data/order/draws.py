"""Random numbers of transforms that draw from the global generators of torch, numpy and Python."""

import pickle
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import numpy as np
import torch

from hpctrain.core.checksum import crc32
from hpctrain.core.errors import DataError
from hpctrain.data.samples import Indices

T = TypeVar("T")


def begin_generators(indices: Indices, epoch: int, seed: int) -> None:
    """Let the global generators depend on seed, epoch and samples only.

    For a process that does nothing else: who trains draws from the same generators.
    """
    start = crc32(np.ascontiguousarray(indices).data, crc32(f"{seed} {epoch}".encode()))
    random.seed(start)
    np.random.seed(start)  # noqa: NPY002 - transforms use it all the same
    torch.default_generator.manual_seed(start)


@contextmanager
def refused_draws(why: str) -> Iterator[None]:
    """Raise if a global generator was drawn from inside.

    Raises:
        DataError: names the generators, says ``why``, and the way out.
    """
    before = _states()
    yield
    if drawn := _drawn(before):
        raise _refusal(drawn, why)


class ThreadDraws:
    """Finds transforms in threads that draw from a generator which the training draws from too.

    In which order threads draw, chance decides: every run has other numbers. While the main
    thread waits for a batch only transforms are at work, so a generator that has moved by then
    was moved by one. All transforms before the first batch of a pass are looked at, later ones
    only if the training waits for them; and none where another thread than the main one waits.
    """

    def __init__(self) -> None:
        self._turn = 0
        """Odd while the main thread waits for a batch, another number each time."""

    def waited(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield ``batches``, and note when they are waited for."""
        iterator = iter(batches)
        is_main = threading.current_thread() is threading.main_thread()
        while True:
            self._turn += is_main
            try:
                given = [next(iterator)]
            except StopIteration:
                return
            finally:
                self._turn += is_main
            yield given.pop()  # the consumer alone has it

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Run a transform inside.

        Raises:
            DataError: it has drawn from a global generator.
        """
        turn = self._turn
        before = _states() if turn % 2 else {}
        yield
        drawn = _drawn(before) if self._turn == turn else []
        if drawn and self._turn == turn:  # the training was not at work while we looked
            raise _refusal(drawn, "which threads would draw from in an order that chance decides")


def _refusal(drawn: list[str], why: str) -> DataError:
    return DataError(
        f"a transform must not draw from the global generator of {' and '.join(drawn)}, {why}; "
        f"take a generator of each sample: PerSample(function, random=True), in a configuration "
        f"data.per_sample and data.random = true; or transform one sample at a time in processes, "
        f"whose generators begin anew with each: PerSample(function) and workers = 1 or more"
    )


def _drawn(before: dict[str, object]) -> list[str]:
    now = _states() if before else {}
    return [name for name, state in now.items() if state != before[name]]


def _states() -> dict[str, object]:
    return {
        "torch": torch.default_generator.get_state().numpy().tobytes(),
        "numpy": pickle.dumps(np.random.get_state(legacy=False)),  # noqa: NPY002 - the global one
        "random": random.getstate(),
    }
