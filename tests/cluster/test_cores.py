import os

import pytest

from hpctrain.cluster.resources import affinity, num_granted, num_siblings, quota


def test_affinity_is_the_mask_of_this_process():
    before = os.sched_getaffinity(0)
    assert set(affinity()) == before
    os.sched_setaffinity(0, {min(before)})
    try:
        assert affinity() == (min(before),)
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


@pytest.fixture
def sixty_four(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {1, 2, 3}, raising=False)


@pytest.fixture
def files(tmp_path):
    """No control group, and cores of one thread."""
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
