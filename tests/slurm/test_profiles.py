"""Scripts with the profiles of sites, tested by a running Slurm with nodes of their size."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.cli.submit import app
from hpctrain.launch import site as sites
from hpctrain.launch.slurm import batch_script
from tests.cluster.slurm import SlurmCluster

pytestmark = [
    pytest.mark.launches,
    pytest.mark.requires("slurm"),
    pytest.mark.conformance,
    pytest.mark.limit(300),
]


@pytest.fixture(scope="module")
def large():
    """Cluster with two nodes that are at least as large as those of each site."""
    with SlurmCluster(nodes=2, cpus=288, gpus=8) as cluster:
        yield cluster


@pytest.mark.parametrize("name", sites.names())
def test_slurm_accepts_the_script_of_a_profile_for_each_template(
    large, tmp_path, monkeypatch, name
):
    monkeypatch.chdir(tmp_path)
    Path("train.py").touch()
    refused = []
    for template in batch_script.names():
        words = ["--site", name, "--template", template, "--nodes", "1", "--account", "me"]
        words += ["--array", "0-1", "--print", "--", "python", "train.py"]
        script = CliRunner().invoke(app, words).stdout
        # The cluster has other partitions, and less memory than its nodes claim CPUs.
        script = re.sub("--partition=.*", "--partition=main", script)
        Path("job.sbatch").write_text(re.sub("--mem=.*", "--mem=2000", script))
        done = large.run(["sbatch", "--test-only", "job.sbatch"], cwd=tmp_path, check=False)
        if done.returncode or "to start at" not in done.stderr:
            refused.append((template, done.stderr))
    assert refused == []


def test_slurm_rejects_more_gpus_than_a_node_has(large, tmp_path):
    """The test above is meaningful: this Slurm counts the GPUs of a node."""
    line = ["sbatch", "--test-only", "--nodes=1", "--gpus-per-node=9", "--wrap", "true"]
    assert large.run(line, cwd=tmp_path, check=False).returncode != 0
