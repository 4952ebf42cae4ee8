"""``hpctrain doctor`` under srun: no finding in a correct job, and planted faults are found."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

pytestmark = [pytest.mark.requires("slurm"), pytest.mark.launches, pytest.mark.limit(240)]

STEPS = {
    "healthy": "-N2 --ntasks-per-node=2 --gpus-per-node=2 --mpi=pmix",
    "one GPU, one core": "-N1 --ntasks-per-node=2 --gpus-per-node=1 --mpi=pmix taskset -c 0",
    "another interface": "-N2 --ntasks-per-node=1 --mpi=pmi2",
}


def wrong(findings):
    return {f["check"]: f["what"] for f in findings if f["level"] in ("warning", "error")}


def test_a_correct_job_has_no_finding_and_planted_faults_are_found(slurm):
    """All job steps run concurrently."""

    def run(options):
        line = ["srun", "--quiet", *options.split(), "hpctrain", "doctor", "--json"]
        done = slurm.run(line, timeout_s=200, check=False)
        assert done.stdout.startswith("["), done.stdout + done.stderr
        return done.returncode, json.loads(done.stdout)

    with ThreadPoolExecutor() as pool:
        output = dict(zip(STEPS, pool.map(run, STEPS.values()), strict=True))
    healthy = output["healthy"][1]
    found = wrong(healthy)
    assert found.keys() <= {"links"}, found  # a busy machine has slow links
    assert {step: code for step, (code, _) in output.items()} == dict.fromkeys(STEPS, 1) | {
        "healthy": int(bool(found))
    }
    (world,) = (f["what"] for f in healthy if f["check"] == "world")
    assert world.startswith("one world of 4 ranks on 2 nodes, started by srun --mpi=pmix")

    faults = wrong(output["one GPU, one core"][1])
    assert "but ranks 0-1 on n" in faults["GPUs"]
    assert "use GPU 0" in faults["GPUs"]
    assert "share 1 core (mask 0)" in faults["cores"]

    alone = output["another interface"][1]
    (world,) = (f for f in alone if f["check"] in ("world", "launcher") and f["do"])
    assert "started 2 ranks with --mpi=pmi2" in world["what"]
    assert "srun --mpi=pmix" in world["do"]
