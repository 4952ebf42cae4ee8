"""List the tests of Horovod 0.28.1 that fail, with reasons."""

EXPECTED = (
    # reason, tests of ``test_torch.py``, numbers of ranks, whether Horovod itself fails too
    (
        "the test gives biases to every optimizer of torch, and Muon takes matrices only",
        ("test_broadcast_state", "test_broadcast_state_options", "test_force_allreduce"),
        (2, 3, 4),
        True,
    ),
    (
        "the test compares a float16 sum with one that was not rounded to float16",
        (
            "test_horovod_allreduce_prescale",
            "test_horovod_grouped_reducescatter_prescale",
            "test_horovod_reducescatter_prescale",
        ),
        (3,),
        True,
    ),
    (
        "the test divides by 3, where an average is multiplied by a rounded third",
        ("test_horovod_join_allreduce",),
        (3,),
        True,
    ),
    (
        "the test wants an error: Horovod's join() has no all-gather, hpctrain's has",
        ("test_horovod_join_allgather",),
        (2, 3, 4),
        False,
    ),
    (
        "the test wants an error: Horovod's join() has no broadcast, hpctrain's has",
        ("test_horovod_join_broadcast",),
        (2,),  # with more ranks, the roots differ
        False,
    ),
    (
        "the test trains without a broadcast, and ranks of different weights are an error here",
        ("test_dynamic_requires_grad",),
        (2, 3, 4),
        False,
    ),
)


def expected_failures(ranks: int, *, horovod: bool) -> dict[str, str]:
    """Return the reason for each test that should fail, with Horovod or with hpctrain."""
    return {
        f"test_torch.py::TorchTests::{test}": reason
        for reason, tests, sizes, with_horovod in EXPECTED
        for test in tests
        if ranks in sizes and (with_horovod or not horovod)
    }
