"""Tests of hpctrain that fail where Horovod moves its tensors, and why; each must still fail."""

_MEMORY = {
    "tests/doctor/ranks/test_probe.py::test_memory_that_is_switched_off_is_no_fault": (
        "Horovod shares no memory, so nothing is told of a setting that switches it off"
    ),
}

EXCEPTIONS = {
    1: {
        "tests/runtime/test_failures.py::"
        "test_a_rank_that_idles_uses_under_one_percent_of_a_core_and_may_take_leave_twice": (
            "Horovod's thread asks the other ranks for work a thousand times a second"
        ),
    },
    2: _MEMORY,
    4: _MEMORY
    | {
        "tests/negotiation/test_timeline_ranks.py::test_two_levels_show_the_rail_and_the_node": (
            "what Horovod does inside one of its operations is not told"
        ),
        "tests/local_sgd/test_diloco.py::test_the_outer_model_is_held_once_per_node": (
            "Horovod shares no memory, so each rank holds the outer model"
        ),
    },
}
"""By the number of ranks and the test. On one rank those that start ranks by themselves."""
