"""The global random generators of a process, which forward and backward may draw from."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def kept_generators() -> Iterator[None]:
    """Let the generators of torch, numpy and Python be after the block where they were before."""
    of_numpy, of_python = np.random.get_state(legacy=False), random.getstate()  # noqa: NPY002
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(of_numpy)  # noqa: NPY002 - a model may draw from it
        random.setstate(of_python)


def begin_generators(seed: int) -> None:
    """Begin the numbers of the generators of torch, numpy and Python anew.

    Args:
        seed: below 2^64.
    """
    torch.default_generator.manual_seed(seed)
    np.random.seed([seed % 2**32, seed >> 32])  # noqa: NPY002 - a model may draw from it
    random.seed(seed)
