"""The memory that is left: the machine's, or less where a control group says so."""

import pytest

from hpctrain.cluster.memory import available_bytes

GIB = 1 << 30


@pytest.fixture
def machine(tmp_path):
    """A machine with 8 GiB left and no control group."""
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    return tmp_path


def left(machine):
    return available_bytes(machine / "meminfo", machine)


def test_without_a_limit_it_is_what_the_machine_has(machine):
    assert left(machine) == 8 * GIB


@pytest.mark.parametrize(
    ("limit", "usage"),
    [
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ],
    ids=["version 2", "version 1"],
)
@pytest.mark.parametrize(
    ("allowed", "used", "expected"),
    [(3 * GIB, GIB, 2 * GIB), (100 * GIB, GIB, 8 * GIB), (GIB, 2 * GIB, 0), ("max", GIB, 8 * GIB)],
)
def test_a_control_group_can_only_lower_it(machine, limit, usage, allowed, used, expected):
    (machine / "memory").mkdir()
    (machine / limit).write_text(f"{allowed}\n")
    (machine / usage).write_text(f"{used}\n")
    assert left(machine) == expected


def test_a_system_that_does_not_tell_is_not_guessed_at(tmp_path):
    assert left(tmp_path) is None


def test_this_machine_has_some():
    assert available_bytes() > 0
