"""Check resources of a process: cores, network adapters, memory, and limits of control groups."""

import math
import os
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpctrain.cluster.process import identity
from hpctrain.cluster.resources import (
    Room,
    affinity,
    available_bytes,
    limits,
    links,
    num_cards,
    num_granted,
    num_siblings,
    quota,
    rooms,
    shortage,
)
from hpctrain.core.libc import sharpen_sleep
from hpctrain.core.units import GIB, MIB


def test_affinity_is_the_mask_of_this_process():
    before = os.sched_getaffinity(0)
    assert set(affinity()) == before
    os.sched_setaffinity(0, {min(before)})
    try:
        assert affinity() == (min(before),)
    finally:
        os.sched_setaffinity(0, before)


def test_limits_are_those_of_the_process_and_of_all_its_control_groups(tmp_path, monkeypatch):
    numbers = {resource.RLIMIT_NOFILE: (256, resource.RLIM_INFINITY)}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: numbers.get(kind, (4096, 8192)))
    cgroup(tmp_path, {"job/pids.max": "512\n", "job/step/pids.max": "max\n"}, "0::/job/step\n")
    for user, threads in ((1000, 512), (0, 512)):
        monkeypatch.setattr(os, "geteuid", lambda user=user: user)
        found = limits(tmp_path, tmp_path / "membership")
        assert found == {"files": 256, "most_files": math.inf, "threads": threads}
    (tmp_path / "membership").write_text("0::/other\n")
    assert limits(tmp_path, tmp_path / "membership")["threads"] == math.inf  # root has no limit
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert limits(tmp_path, tmp_path / "membership")["threads"] == 4096


def cgroup(tmp_path, files, membership):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "membership").write_text(membership)
    return quota(tmp_path, tmp_path / "membership")


@pytest.mark.parametrize(
    ("files", "membership", "cores"),
    [
        ({"cpu.max": "150000 100000\n"}, "0::/\n", 1.5),
        ({"cpu.max": "max 100000\n"}, "0::/\n", None),
        ({"job/cpu.max": "400000 100000\n", "job/step/cpu.max": "max 1\n"}, "0::/job/step\n", 4),
        ({"job/cpu.max": "400000 100000\n", "job/a/cpu.max": "200000 100000\n"}, "0::/job/a\n", 2),
        ({"other/cpu.max": "100000 100000\n"}, "0::/job\n", None),
        (
            {
                "cpu,cpuacct/a/cpu.cfs_quota_us": "50000",
                "cpu,cpuacct/a/cpu.cfs_period_us": "100000",
            },
            "4:cpu,cpuacct:/a\n1:name=systemd:/\n",
            0.5,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "4:cpu:/\n", None),
        ({}, "0::/\n", None),
    ],
    ids=["v2", "v2 unlimited", "parent", "smallest", "foreign", "v1", "v1 unlimited", "no file"],
)
def test_the_quota_is_the_smallest_limit_of_all_parents(tmp_path, files, membership, cores):
    assert cgroup(tmp_path, files, membership) == cores


def test_a_machine_without_cgroups_sets_no_limit(tmp_path):
    assert quota(tmp_path, tmp_path / "missing") is None


@pytest.fixture
def sixty_four(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3}, raising=False)


@pytest.fixture
def files(tmp_path):
    """Provide system folders without a control group, and cores with one thread each."""
    return {
        "root": tmp_path / "cgroup",
        "membership": tmp_path / "membership",
        "siblings": tmp_path / "siblings",
    }


@pytest.mark.parametrize(
    ("environ", "number"),
    [
        ({}, 64),
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "8"}, 8),
        ({"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "80"}, 64),
        ({"PBS_JOBID": "7"}, 3),
    ],
)
@pytest.mark.usefixtures("sixty_four")
def test_cores_are_those_of_the_job(environ, number, files):
    assert num_granted(environ, **files) == number


@pytest.mark.usefixtures("sixty_four")
def test_a_container_has_the_cores_of_its_set(files):
    (files["root"] / "box").mkdir(parents=True)
    (files["root"] / "box/cpuset.cpus.effective").write_text("0-3,8\n")
    files["membership"].write_text("0::/box\n")
    assert num_granted({}, **files) == 5


@pytest.mark.parametrize(("text", "number"), [("0,64", 2), ("0-3", 4), ("0", 1)])
@pytest.mark.usefixtures("sixty_four")
def test_hardware_threads_are_no_cores(text, number, files):
    files["siblings"].write_text(f"{text}\n")
    assert num_siblings(files["siblings"]) == number
    assert num_granted({}, **files) == 64 // number


def card(folder, name, *states):
    (folder / name).mkdir(parents=True)
    for i, state in enumerate(states, start=1):
        (folder / name / f"ports/{i}").mkdir(parents=True)
        (folder / name / f"ports/{i}/state").write_text(f"{state}\n")


def test_only_adapters_with_an_active_port_count(tmp_path):
    card(tmp_path / "infiniband", "mlx5_0", "4: ACTIVE")
    card(tmp_path / "infiniband", "mlx5_1", "1: DOWN", "4: ACTIVE")
    card(tmp_path / "infiniband", "mlx5_2", "1: DOWN")
    card(tmp_path / "cxi", "cxi0")
    assert num_cards((tmp_path / "infiniband", tmp_path / "cxi")) == 3


def test_host_without_fast_adapters_has_its_ethernet(tmp_path):
    card(tmp_path, "mlx5_0", "1: DOWN")
    assert num_cards((tmp_path,)) == 1
    assert num_cards((tmp_path / "missing",)) == 1


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
    """Provide a machine with 8 GiB of free memory and no control group."""
    (tmp_path / "meminfo").write_text("MemTotal: 16777216 kB\nMemAvailable: 8388608 kB\n")
    return tmp_path


def left(machine):
    return available_bytes(machine / "meminfo", machine / "groups", machine / "membership")


def join(machine, version, group, *, allowed, used, **statistics):
    """Simulate that this process is in a control group."""
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


def test_available_memory_without_a_limit_is_that_of_the_machine(machine):
    assert left(machine) == 8 * GIB


@VERSIONS
@pytest.mark.parametrize(
    ("allowed", "used", "expected"),
    [(3 * GIB, GIB, 2 * GIB), (100 * GIB, GIB, 8 * GIB), (GIB, 2 * GIB, 0), ("max", GIB, 8 * GIB)],
)
def test_a_cgroup_can_only_lower_the_memory_limit(machine, version, allowed, used, expected):
    join(machine, version, "job/step", allowed=allowed, used=used)
    assert left(machine) == expected


@pytest.mark.parametrize(("version", "allowed"), [(1, (1 << 63) - 4096), (2, "max")])
def test_a_cgroup_without_a_limit_adds_no_memory_limit(machine, version, allowed):
    join(machine, version, "job", allowed=allowed, used=GIB)
    (room,) = rooms(machine / "meminfo", machine / "groups", machine / "membership")
    assert room == machine_of(8 * GIB)


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


def test_unknown_memory_is_not_estimated(tmp_path):
    assert left(tmp_path) is None
    assert available_bytes() > 0


def machine_of(left_bytes):
    return Room((0, 0), "this machine", left_bytes)


def test_the_ranks_of_a_node_take_together():
    ranks = [[machine_of(8 * GIB)]] * 4
    assert shortage(ranks, GIB) is None
    text = shortage(ranks, 2 * GIB)
    assert "must have 8.0 GiB" in text
    assert "4 x 2.0 GiB" in text
    assert "this machine has 8.0 GiB available" in text


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
    assert "but group 0 has" in shortage(apart, 2 * GIB)
    together = [[machine_of(8 * GIB), group(0, 2 * GIB)] for _ in range(2)]
    assert "but group 0 has" in shortage(together, GIB)


def test_facts_of_the_last_rank_count():
    assert shortage([[machine_of(8 * GIB)], [machine_of(GIB)]], GIB) is not None


def test_without_facts_nothing_is_refused():
    assert shortage([[], []], 1 << 50) is None


TELL = "from hpctrain.cluster.process import identity; print(identity().namespace)"


def output_by(*command):
    done = subprocess.run([*command, sys.executable, "-c", TELL], capture_output=True, check=True)
    return done.stdout.decode().strip()


def test_processes_of_one_machine_see_each_other():
    assert identity().pid == os.getpid()
    assert output_by() == str(identity().namespace)


@pytest.mark.requires("cluster")
def test_a_container_has_separate_ids():
    unshare = shutil.which("unshare")
    assert output_by(unshare, "--pid", "--fork") != str(identity().namespace)


def test_timer_slack_is_reduced():
    slack = Path("/proc/self/timerslack_ns")
    before = int(slack.read_text())
    sharpen_sleep()
    assert int(slack.read_text()) == 1 < before


def test_links_are_live_devices_with_the_rates_that_the_system_knows(tmp_path):
    cards, network = tmp_path / "infiniband", tmp_path / "net"
    card(cards, "mlx5_0", "2: INIT", "4: ACTIVE")
    card(cards, "mlx5_1", "1: DOWN")
    (cards / "mlx5_0/ports/1/rate").write_text("100 Gb/sec (4X EDR)\n")
    for name, state, speed in (
        ("eth0", "up", "1000"),
        ("eth1", "down", "-1"),
        ("eth2", "up", "-1"),
    ):
        (network / name / "device").mkdir(parents=True)
        (network / name / "operstate").write_text(f"{state}\n")
        (network / name / "speed").write_text(f"{speed}\n")
    (network / "lo").mkdir()
    assert links((cards,), network) == {
        "mlx5_0": "100 Gb/sec (4X EDR)", "eth0": "1000 Mbit/s", "eth2": "unknown"
    }  # fmt: skip
