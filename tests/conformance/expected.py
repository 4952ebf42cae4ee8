"""Tests of Horovod 0.28.1 that fail, and why."""

from collections.abc import Container
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expected:
    """Some tests of ``test_torch.py`` that fail for one reason."""

    reason: str
    tests: tuple[str, ...]
    ranks: Container[int]
    """On so many ranks."""
    with_horovod: bool
    """Horovod itself fails too, under today's torch."""


EXPECTED = (
    Expected(
        "the test gives biases to every optimizer of torch, and Muon takes matrices only",
        ("test_broadcast_state", "test_broadcast_state_options", "test_force_allreduce"),
        ranks=(2, 3, 4),
        with_horovod=True,
    ),
    Expected(
        "the test compares a float16 sum with one that was not rounded to float16",
        (
            "test_horovod_allreduce_prescale",
            "test_horovod_grouped_reducescatter_prescale",
            "test_horovod_reducescatter_prescale",
        ),
        ranks=(3,),
        with_horovod=True,
    ),
    Expected(
        "the test divides by 3, where an average is multiplied by a rounded third",
        ("test_horovod_join_allreduce",),
        ranks=(3,),
        with_horovod=True,
    ),
    Expected(
        "the test wants an error: Horovod's join() has no all-gather, hpctrain's has",
        ("test_horovod_join_allgather",),
        ranks=(2, 3, 4),
        with_horovod=False,
    ),
    Expected(
        "the test wants an error: Horovod's join() has no broadcast, hpctrain's has",
        ("test_horovod_join_broadcast",),
        ranks=(2,),  # on more, the roots differ
        with_horovod=False,
    ),
)


def expected_failures(ranks: int, *, horovod: bool) -> dict[str, str]:
    """Return the reason for each test that should fail, with Horovod or with hpctrain."""
    return {
        f"test_torch.py::TorchTests::{test}": group.reason
        for group in EXPECTED
        for test in group.tests
        if ranks in group.ranks and (group.with_horovod or not horovod)
    }
