"""The memory that is left: the machine's, or less where a control group says so."""

import pytest

from hpctrain.cluster.resources import Room, available_bytes, shortage
from hpctrain.core.units import GIB, MIB

TOTALS = {
    "active_file": "total_active_file",
    "inactive_file": "total_inactive_file",
    "file_dirty": "total_dirty",
    "file_writeback": "total_writeback",
}
"""How version 1 calls what version 2 counts."""

VERSIONS = pytest.mark.parametrize("version", [1, 2])


@pytest.fixture
def machine(tmp_path):
    """A machine with 8 GiB left and no control group."""
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    return tmp_path


def left(machine):
    return available_bytes(machine / "meminfo", machine / "groups", machine / "membership")


def join(machine, version, group, *, allowed, used, **statistics):
    """Put this process into a control group."""
    folder = machine / ("groups" if version == 2 else "groups/memory") / group
    folder.mkdir(parents=True, exist_ok=True)
    names = ("memory.max", "memory.current")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        statistics = {TOTALS[name]: number for name, number in statistics.items()}
    for name, value in zip(names, (allowed, used), strict=True):
        (folder / name).write_text(f"{value}\n")
    lines = [f"{name} {number}\n" for name, number in statistics.items()]
    (folder / "memory.stat").write_text("anon 1\n" + "".join(lines))
    line = f"0::/{group}" if version == 2 else f"4:memory:/{group}"
    (machine / "membership").write_text(f"{line}\n")


def test_without_a_limit_it_is_what_the_machine_has(machine):
    assert left(machine) == 8 * GIB


@VERSIONS
@pytest.mark.parametrize(
    ("allowed", "used", "expected"),
    [(3 * GIB, GIB, 2 * GIB), (100 * GIB, GIB, 8 * GIB), (GIB, 2 * GIB, 0), ("max", GIB, 8 * GIB)],
)
def test_a_control_group_can_only_lower_it(machine, version, allowed, used, expected):
    join(machine, version, "job/step", allowed=allowed, used=used)
    assert left(machine) == expected


@VERSIONS
def test_the_limit_of_a_parent_counts(machine, version):
    join(machine, version, "job", allowed=3 * GIB, used=GIB)
    join(machine, version, "job/step", allowed="max", used=GIB)
    assert left(machine) == 2 * GIB


@VERSIONS
@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"active_file": GIB, "inactive_file": 5 * GIB}, 7 * GIB),
        ({"inactive_file": 3 * GIB, "file_dirty": GIB, "file_writeback": GIB}, 2 * GIB),
    ],
)
def test_pages_of_files_that_can_be_dropped_are_left(machine, version, files, expected):
    join(machine, version, "job", allowed=8 * GIB, used=7 * GIB, **files)
    assert left(machine) == expected


def test_a_system_that_does_not_tell_is_not_guessed_at(tmp_path):
    assert left(tmp_path) is None
    assert available_bytes() > 0


def machine_of(left_bytes):
    return Room((0, 0), "this machine", left_bytes)


def test_the_ranks_of_a_node_take_together():
    ranks = [[machine_of(8 * GIB)]] * 4
    assert shortage(ranks, GIB) is None
    text = shortage(ranks, 2 * GIB)
    assert "need 8.0 GiB" in text
    assert "4 x 2.0 GiB" in text
    assert "8.0 GiB are left in this machine" in text


def test_a_page_table_of_all_for_each_rank_is_counted():
    # 256 ranks that map 64 MiB of each: half as much again, for the tables.
    ranks = [[machine_of(20 * GIB)]] * 256
    assert shortage(ranks, 64 * MIB) is not None
    assert shortage([[machine_of(27 * GIB)]] * 256, 64 * MIB) is None


def test_a_group_counts_the_ranks_that_are_in_it():
    def group(number, left_bytes):
        return Room((1, number), f"group {number}", left_bytes)

    apart = [[machine_of(8 * GIB), group(n, 2 * GIB)] for n in range(2)]
    assert shortage(apart, GIB) is None
    assert "in group 0" in shortage(apart, 2 * GIB)
    together = [[machine_of(8 * GIB), group(0, 2 * GIB)] for _ in range(2)]
    assert "in group 0" in shortage(together, GIB)


def test_what_the_last_rank_sees_counts():
    assert shortage([[machine_of(8 * GIB)], [machine_of(GIB)]], GIB) is not None


def test_without_facts_nothing_is_refused():
    assert shortage([[], []], 1 << 50) is None
