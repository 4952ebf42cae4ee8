"""The cores of a job: what the scheduler, the container and the kernel say."""

import os

import pytest

from hpctrain.doctor.ranks.allotted_cores import num_granted, num_siblings


@pytest.fixture(autouse=True)
def _sixty_four(monkeypatch):
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
def test_cores_are_those_of_the_job(environ, number, files):
    assert num_granted(environ, **files) == number


def test_a_container_has_the_cores_of_its_set(files):
    (files["root"] / "box").mkdir(parents=True)
    (files["root"] / "box/cpuset.cpus.effective").write_text("0-3,8\n")
    files["membership"].write_text("0::/box\n")
    assert num_granted({}, **files) == 5


@pytest.mark.parametrize(("text", "number"), [("0,64", 2), ("0-3", 4), ("0", 1)])
def test_hardware_threads_are_no_cores(text, number, files):
    files["siblings"].write_text(f"{text}\n")
    assert num_siblings(files["siblings"]) == number
    assert num_granted({}, **files) == 64 // number
