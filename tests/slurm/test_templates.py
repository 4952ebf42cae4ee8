"""Every template, submitted as it is, on a real Slurm: one world, and a run that has finished."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.slurm import Job, SlurmCluster
from tests.slurm import training

pytestmark = [pytest.mark.launches, pytest.mark.requires("slurm")]

ROOT = Path(__file__).parents[2]

WORLDS = {
    "single_node": (1, 2),
    "multi_node": (2, 4),
    "hybrid": (2, 4),
    "requeue": (2, 4),
    "staged_data": (2, 4),
    "mpirun": (2, 4),
    "chain": (2, 4),
    "restart": (3, 6),
}
"""Nodes and ranks of each template that runs on any cluster."""

QUICK = ("single_node", "multi_node", "hybrid", "requeue", "staged_data", "mpirun")

SITE = """\
export SBATCH_PARTITION=low
export LOCAL_DIR=/dev/shm
export HPCTRAIN_PROBE=off
"""
"""A site of its own; /dev/shm is what each virtual node has for itself."""

BEGINNINGS = ("started", "resumed")
"""Events with which a part of a run begins."""

Submit = Callable[..., Job]


@pytest.fixture
def submit(tmp_path: Path) -> Submit:
    """Submit a template of this checkout's ``slurm``, in a folder of its own, with a site file.

    Options of ``sbatch`` are ``before`` it, those of ``hpctrain train`` behind; further keywords
    are variables.
    """
    (tmp_path / "site.sh").write_text(SITE)

    def do(cluster, name, *options, before=(), label="", **more):
        folder = tmp_path / (label or name)
        folder.mkdir(exist_ok=True)
        environ = {
            "HPCTRAIN_SITE": str(tmp_path / "site.sh"),
            "CONFIG": str(training.write(folder)),
            "SBATCH_PARTITION": "low",
            "RUN_DIRECTORY": str(folder / "run"),
        }
        script = ROOT / "slurm" / f"{name}.sbatch"
        return cluster.sbatch(*before, script, *options, environ=environ | more, cwd=folder)

    return do


def records(folder: Path) -> list[dict[str, Any]]:
    """What the run of a folder has written down so far."""
    path = folder / "run/metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def check_finished(job: Job, folder: Path, nodes: int, ranks: int) -> dict[str, Any]:
    """The job and the run in its folder have finished, on one world with two levels."""
    assert job.wait(240) == "COMPLETED", job.output()
    last = records(folder)[-1]
    assert last["event"] == "finished", job.output()
    assert (last["nodes"], last["world_size"]) == (nodes, ranks), job.output()
    plan = json.loads((folder / "run/plan.json").read_text())
    assert plan["nodes"] == [ranks // nodes] * nodes
    assert plan["plan"]["node_memory"] == "memfd"
    assert plan["plan"]["num_rails"] == (ranks // nodes if nodes > 1 else 0)
    return last


@pytest.mark.limit(300)
def test_templates_submitted_as_they_are_finish_on_one_world(slurm, submit, tmp_path):
    jobs = {name: submit(slurm, name, "--set", "train.epochs=2") for name in QUICK}
    for name, job in jobs.items():
        check_finished(job, tmp_path / name, *WORLDS[name])


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_the_other_templates_finish_on_one_world(slurm, submit, tmp_path):
    jobs = {name: submit(slurm, name) for name in WORLDS if name not in QUICK}
    for name, job in jobs.items():
        check_finished(job, tmp_path / name, *WORLDS[name])


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_gpu_gives_each_rank_a_gpu_of_its_node(slurm_gpus, submit, tmp_path):
    job = submit(slurm_gpus, "gpu")
    job.wait_for("RUNNING")
    assert job.facts()["TresPerNode"].endswith("gpu:2")
    check_finished(job, tmp_path / "gpu", 2, 4)


def test_apptainer_says_that_it_is_untested():
    for name in ("apptainer.sbatch", "hpctrain.def"):
        assert "UNTESTED" in (ROOT / "slurm" / name).read_text()


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_staged_data_runs_from_a_copy_of_its_environment(slurm, submit, tmp_path):
    job = submit(
        slurm, "staged_data", ENVIRONMENT_TAR=str(thin_environment(tmp_path)), PYTHONPATH=""
    )
    check_finished(job, tmp_path / "staged_data", 2, 4)
    facts = json.loads((tmp_path / "staged_data/run/env.json").read_text())
    assert facts["command"][0].startswith(f"/dev/shm/hpctrain-{job.id}/env/")
    for node in job.nodes():
        left = subprocess.run(
            slurm.enter(node, ["ls", "/dev/shm"]), capture_output=True, text=True, check=True
        )
        assert f"hpctrain-{job.id}" not in left.stdout


def thin_environment(folder: Path) -> Path:
    """Pack an environment with hpctrain and MPI, which finds other packages where they are."""
    made, source = folder / "env", Path(sys.prefix)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", made], check=True)
    packages = next(made.glob("lib/python3*/site-packages"))
    paths = [str(source / packages.relative_to(made)), str(ROOT)]
    lines = "; ".join(f"site.addsitedir({path!r})" for path in paths)
    (packages / "packages.pth").write_text(f"import site; {lines}\n")
    shutil.copytree(ROOT / "hpctrain", packages / "hpctrain")
    for library in (*source.glob("lib/libmpi*"), *source.glob("lib/libopen*")):
        shutil.copy2(library, made / "lib", follow_symlinks=False)
    if (source / "lib/openmpi").exists():
        shutil.copytree(source / "lib/openmpi", made / "lib/openmpi")
    return Path(shutil.make_archive(str(folder / "env"), "tar", made))


@pytest.mark.limit(120)
def test_a_failed_link_stops_its_chain(slurm, submit, tmp_path):
    shape = ("--nodes=1", "--ntasks-per-node=1")
    link = submit(slurm, "chain", "--set", "train.no_such_key=1", before=shape)
    assert link.wait() == "FAILED"
    behind = next_link(slurm, link)
    assert behind.wait(30) == "CANCELLED"
    assert (behind.facts()["NumNodes"], behind.facts()["NumTasks"]) == ("1", "1")
    assert records(tmp_path / "chain") == []


@pytest.mark.conformance
@pytest.mark.limit(400)
def test_three_links_continue_one_run_bit_for_bit(slurm, submit, tmp_path):
    whole = submit(slurm, "multi_node", label="whole")
    link = submit(slurm, "chain", label="links")
    for steps in (10, 20):
        wait_for_step(tmp_path / "links", steps, link)
        link.signal("USR1")
        assert link.wait() == "COMPLETED", link.output()
        link = next_link(slurm, link)
    links = check_finished(link, tmp_path / "links", 2, 4)
    assert links["state_hash"] == check_finished(whole, tmp_path / "whole", 2, 4)["state_hash"]
    assert "next" not in link.output()
    parts = [r["event"] for r in records(tmp_path / "links") if r["event"] in BEGINNINGS]
    assert parts == ["started", "resumed", "resumed"]


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_a_chain_that_has_finished_early_takes_its_next_link_back(slurm, submit, tmp_path):
    link = submit(slurm, "chain")
    check_finished(link, tmp_path / "chain", 2, 4)
    assert next_link(slurm, link).wait(30) == "CANCELLED"


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_under_mpirun_the_signal_before_the_end_of_the_time_reaches_the_ranks(
    slurm, submit, tmp_path
):
    first = submit(slurm, "mpirun")
    wait_for_step(tmp_path / "mpirun", 10, first)
    slurm.run(["scancel", "--batch", "--signal=USR1", str(first.id)])  # as Slurm does for B:USR1
    assert (first.wait(), first.exit_code()) == ("FAILED", 85), first.output()
    assert f"RUN_DIRECTORY={tmp_path}/mpirun/run" in first.output()
    check_finished(submit(slurm, "mpirun"), tmp_path / "mpirun", 2, 4)


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_restart_goes_on_without_the_node_that_lost_its_power(slurm, submit, tmp_path):
    job = submit(slurm, "restart", "--set", "train.epochs=40")
    wait_for_step(tmp_path / "restart", 10, job)
    cut = time.monotonic()
    slurm.kill_node(job.nodes()[1])
    wait_until(lambda: goes_on(tmp_path / "restart", 2), job, 60)
    assert time.monotonic() - cut < 40, job.output()
    assert job.wait() == "COMPLETED", job.output()
    last = records(tmp_path / "restart")[-1]
    assert (last["event"], last["nodes"], last["world_size"]) == ("finished", 2, 4)
    assert job.restarts() == 0


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_restart_is_queued_again_when_the_node_of_its_script_lost_its_power(
    slurm, submit, tmp_path
):
    job = submit(slurm, "restart", WATCH_S="5")
    wait_for_step(tmp_path / "restart", 10, job)
    slurm.kill_node(job.nodes()[0])
    check_finished(job, tmp_path / "restart", 3, 6)
    assert job.restarts() == 1


def goes_on(folder: Path, nodes: int) -> bool:
    """Whether a part of the run on so many nodes has made a step."""
    begun = False
    for record in records(folder):
        if record["event"] in BEGINNINGS:
            begun = record["nodes"] == nodes
        if begun and record["event"] == "step":
            return True
    return False


def next_link(cluster: SlurmCluster, link: Job) -> Job:
    """The job that a link of a chain has queued."""
    found = re.search(r"job (\d+) goes on", link.output())
    assert found, link.output()
    return cluster.job(int(found[1]))


def wait_for_step(folder: Path, step: int, job: Job) -> None:
    """Wait until a run has made so many steps."""
    wait_until(lambda: any(r.get("step", 0) >= step for r in records(folder)), job, 120)


def wait_until(true: Callable[[], bool], job: Job, timeout_s: float) -> None:
    give_up = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < give_up, job.output()
        time.sleep(0.1)
