"""Every template, submitted unchanged to a real Slurm, gives one world and a finished run."""

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster.slurm import Job, SlurmCluster
from tests.harness.pace import scaled
from tests.slurm.watching import ROOT, Run

pytestmark = [pytest.mark.launches, pytest.mark.requires("slurm")]

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
"""Number of nodes and ranks of each template that runs on any cluster."""

QUICK = ("staged_data",)  # tests of requeued jobs run multi_node and requeue

SITE = """\
export SBATCH_PARTITION=low
export LOCAL_DIR=/dev/shm
export HPCTRAIN_PROBE=off
"""
"""Settings of a site; /dev/shm is local to each virtual node."""


@pytest.fixture
def runs(tmp_path: Path) -> Callable[..., Run]:
    """Function that creates a run by name in its own folder, with a site file."""
    (tmp_path / "site.sh").write_text(SITE)
    return lambda cluster, name: Run(cluster, tmp_path / name, shape=(), site=tmp_path / "site.sh")


def check_finished(job: Job, run: Run, nodes: int, ranks: int) -> None:
    """Check that job and run have finished, in one world with this number of nodes and ranks."""
    assert job.wait(240) == "COMPLETED", job.output()
    last = run.records()[-1]
    assert last["event"] == "finished", job.output()
    assert (last["nodes"], last["world_size"]) == (nodes, ranks), job.output()
    plan = json.loads((run.directory / "plan.json").read_text())
    assert plan["nodes"] == [ranks // nodes] * nodes
    assert plan["plan"]["node_memory"] == "memfd"
    assert plan["plan"]["num_rails"] == (ranks // nodes if nodes > 1 else 0)


@pytest.mark.limit(300)
@pytest.mark.parametrize(
    "names",
    [QUICK, pytest.param({*WORLDS} - {*QUICK}, marks=pytest.mark.conformance)],
    ids=["quick", "others"],
)
def test_unchanged_templates_finish_on_one_world(slurm, runs, names):
    made = {name: runs(slurm, name) for name in names}
    jobs = {name: run.submit(name) for name, run in made.items()}
    for name, job in jobs.items():
        check_finished(job, made[name], *WORLDS[name])


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_gpu_gives_each_rank_a_gpu_of_its_node(slurm, runs):
    run = runs(slurm, "gpu")
    job = run.submit("gpu")
    job.wait_for("RUNNING")
    assert job.facts()["TresPerNode"].endswith("gpu:2")
    check_finished(job, run, 2, 4)


def test_apptainer_files_state_that_they_are_untested():
    for name in ("apptainer.sbatch", "hpctrain.def"):
        assert "UNTESTED" in (ROOT / "slurm" / name).read_text()


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_staged_data_runs_from_a_copy_of_its_environment(slurm, runs, tmp_path):
    run, environment = runs(slurm, "staged_data"), thin_environment(tmp_path)
    job = run.submit("staged_data", ENVIRONMENT_TAR=str(environment), PYTHONPATH="")
    check_finished(job, run, 2, 4)
    facts = json.loads((run.directory / "env.json").read_text())
    assert facts["command"][0].startswith(f"/dev/shm/hpctrain-{job.id}/env/")
    for node in job.nodes():
        left = subprocess.run(
            slurm.enter(node, ["ls", "/dev/shm"]), capture_output=True, text=True, check=True
        )
        assert f"hpctrain-{job.id}" not in left.stdout


def thin_environment(folder: Path) -> Path:
    """Pack an environment with hpctrain and MPI; other packages are referenced."""
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


def next_link(cluster: SlurmCluster, link: Job) -> Job:
    """Return the job that a link of a chain has queued."""
    found = re.search(r"job (\d+) continues", link.output())
    assert found, link.output()
    return cluster.job(int(found[1]))


@pytest.mark.limit(120)
def test_a_failed_link_stops_its_chain(slurm, tmp_path):
    run = Run(slurm, tmp_path / "chain", shape=("--nodes=1", "--ntasks-per-node=1"))
    link = run.submit("chain", more=("--set", "train.no_such_key=1"))
    assert link.wait() == "FAILED"
    behind = next_link(slurm, link)
    assert behind.wait(30) == "CANCELLED"  # instead of pending forever
    assert (behind.facts()["NumNodes"], behind.facts()["NumTasks"]) == ("1", "1")
    assert run.records() == []


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_a_chain_that_finishes_early_cancels_its_next_link(slurm, runs):
    run = runs(slurm, "chain")
    link = run.submit("chain")
    check_finished(link, run, 2, 4)
    assert next_link(slurm, link).wait(30) == "CANCELLED"


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_with_mpirun_the_signal_before_the_time_limit_reaches_the_ranks(slurm, runs):
    run = runs(slurm, "mpirun")
    first = run.submit("mpirun")
    run.wait_for_step(10)
    # as Slurm does for --signal=B:USR1
    slurm.run(["scancel", "--batch", "--signal=USR1", str(first.id)])
    assert (first.wait(), first.exit_code()) == ("FAILED", 85), first.output()
    assert f"RUN_DIRECTORY={run.directory}" in first.output()
    check_finished(run.submit("mpirun"), run, 2, 4)


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_restart_continues_without_a_lost_node(slurm, runs):
    run = runs(slurm, "restart")
    job = run.submit("restart", more=("--set", "train.epochs=40"))
    run.wait_for_step(10)
    cut = time.monotonic()
    slurm.kill_node(job.nodes()[1])
    run.wait_for_step(1, part=2)
    assert time.monotonic() - cut < scaled(40), job.output()
    assert job.wait() == "COMPLETED", job.output()
    last = run.records()[-1]
    assert (last["event"], last["nodes"], last["world_size"]) == ("finished", 2, 4)
    assert job.restarts() == 0


@pytest.mark.conformance
@pytest.mark.limit(300)
def test_restart_is_requeued_after_the_loss_of_the_node_of_its_script(slurm, runs):
    run = runs(slurm, "restart")
    job = run.submit("restart", WATCH_S="5")
    run.wait_for_step(10)
    slurm.kill_node(job.nodes()[0])
    check_finished(job, run, 3, 6)
    assert job.restarts() == 1
