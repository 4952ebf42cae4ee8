import os

import pytest

from hpctrain.cluster.cores import affinity, quota


def test_affinity_is_the_mask_of_this_process():
    assert set(affinity()) == os.sched_getaffinity(0)


def test_affinity_follows_a_change_of_the_mask():
    before = os.sched_getaffinity(0)
    one = min(before)
    os.sched_setaffinity(0, {one})
    try:
        assert affinity() == (one,)
    finally:
        os.sched_setaffinity(0, before)


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
def test_quota_is_the_smallest_limit_on_the_way_up(tmp_path, files, membership, cores):
    assert cgroup(tmp_path, files, membership) == cores


def test_a_machine_without_cgroups_sets_no_limit(tmp_path):
    assert quota(tmp_path, tmp_path / "missing") is None
