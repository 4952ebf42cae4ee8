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
    return available_bytes(machine / "meminfo", machine / "groups", machine / "membership")


def join(machine, version, group, *, allowed, used, droppable=0):
    """Put this process into a control group."""
    tree = "groups" if version == 2 else "groups/memory"
    folder = machine / tree / group
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    (folder / names[0]).write_text(f"{allowed}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\n{names[2]} {droppable}\n")
    line = f"0::/{group}" if version == 2 else f"4:memory:/{group}"
    (machine / "membership").write_text(f"{line}\n")


def test_without_a_limit_it_is_what_the_machine_has(machine):
    assert left(machine) == 8 * GIB


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(
    ("allowed", "used", "expected"),
    [(3 * GIB, GIB, 2 * GIB), (100 * GIB, GIB, 8 * GIB), (GIB, 2 * GIB, 0), ("max", GIB, 8 * GIB)],
)
def test_a_control_group_can_only_lower_it(machine, version, allowed, used, expected):
    join(machine, version, "job/step", allowed=allowed, used=used)
    assert left(machine) == expected


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_parent_counts(machine, version):
    join(machine, version, "job", allowed=3 * GIB, used=GIB)
    join(machine, version, "job/step", allowed="max", used=GIB)
    assert left(machine) == 2 * GIB


@pytest.mark.parametrize("version", [1, 2])
def test_pages_of_files_that_can_be_dropped_are_left(machine, version):
    join(machine, version, "job", allowed=8 * GIB, used=7 * GIB, droppable=6 * GIB)
    assert left(machine) == 7 * GIB


def test_a_system_that_does_not_tell_is_not_guessed_at(tmp_path):
    assert left(tmp_path) is None


def test_this_machine_has_some():
    assert available_bytes() > 0
