"""Check ranks on virtual nodes with a network: exact sums, few bytes, and failures."""

import json
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.vcluster import Finished, VirtualCluster

pytestmark = [pytest.mark.launches, pytest.mark.requires("cluster"), pytest.mark.limit(120)]

JOB = ["python", str(Path(__file__).with_name("network_job.py"))]
MPICH = pytest.mark.requires("mpich")
# Ranks of MPICH that share a core use it for waiting, which would take a tenth of the time of all
# tests of one rank. The law depends only on the order of ranks.
MPIS = (
    "openmpi",
    pytest.param("mpich", marks=[MPICH, pytest.mark.conformance]),
)

SILENT_S = 5.0
PATIENCE_S = 3  # HPCTRAIN_TIMEOUT where a link is cut permanently


@pytest.fixture(scope="module")
def pair() -> Iterator[VirtualCluster]:
    """Provide two nodes on fast links."""
    with VirtualCluster(nodes=2) as cluster:
        yield cluster


@pytest.fixture
def slow_pair() -> Iterator[VirtualCluster]:
    """Provide two nodes whose links a test may change."""
    with VirtualCluster(nodes=2, rate="200mbit") as cluster:
        yield cluster


def facts_of(done: Finished) -> dict[str, Any]:
    """Return the results of the job."""
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def start(cluster: VirtualCluster, *options: str, **given: Any) -> subprocess.Popen[str]:
    """Start the job on a rank of each node; return when its ranks are summing."""
    process = cluster.start([*JOB, *options], **given)
    assert process.stdout is not None
    message = process.stdout.readline()
    if message != "summing\n":
        done = cluster.finish(process)
        pytest.fail(message + done.stdout + done.stderr)
    return process


@pytest.mark.parametrize("mpi", MPIS)
@pytest.mark.parametrize(
    ("order", "ranks_per_node", "nodes"),
    [
        pytest.param("block", (2, 2), [[0, 1], [2, 3]], marks=pytest.mark.conformance),
        pytest.param("cyclic", (2, 2), [[0, 2], [1, 3]], marks=pytest.mark.conformance),
        ("random", (2, 2), [[0, 3], [1, 2]]),
        pytest.param("block", (3, 1), [[0, 1, 2], [3]], marks=pytest.mark.conformance),
    ],
)
def test_sums_are_exact_in_any_order_and_each_byte_crosses_once(
    pair, mpi, order, ranks_per_node, nodes
):
    done = pair.run(
        [*JOB, "--kib", "4096"],
        ranks_per_node=ranks_per_node,
        order=order,
        mpi=mpi,
    )
    facts = facts_of(done)
    assert facts["nodes"] == nodes
    assert set(facts["hosts"]) == {"n0", "n1"}
    for rank in facts["ranks"]:
        # In a sum over two nodes, half of the message leaves a node twice: 2 (N-1)/N = 1.
        assert rank["sent_bytes"] <= 1.03 * 4 * (4 << 20), rank
    assert pair.processes() == []


def test_sums_are_exact_on_three_nodes():
    with VirtualCluster(nodes=3) as cluster:
        facts = facts_of(cluster.run([*JOB, "--kib", "4096"]))
    assert facts["nodes"] == [[0], [1], [2]]
    for rank in facts["ranks"]:
        assert rank["sent_bytes"] <= 1.03 * 4 / 3 * 4 * (4 << 20), rank


@pytest.mark.conformance
@pytest.mark.parametrize("mpi", MPIS)
def test_ranks_that_wait_for_a_late_node_yield_their_cores(pair, mpi):
    late = ["--late-node", "n1", "--late-s", "0.5"]
    facts = facts_of(pair.run([*JOB, *late], ranks_per_node=(2, 2), mpi=mpi))
    for rank in facts["ranks"]:
        assert rank["seconds"] >= 4 * 0.5
        assert rank["cores"] < 0.2, rank


@pytest.mark.conformance
def test_node_with_high_latency_takes_part():
    with VirtualCluster(nodes=2, rate="200mbit", latency={"n1": "200ms"}) as cluster:
        facts = facts_of(cluster.run([*JOB, "--steps", "2", "--kib", "64"]))
    assert all(rank["seconds"] >= 2 * 0.2 for rank in facts["ranks"])


@pytest.mark.conformance
def test_a_run_survives_a_link_that_drops_to_a_tenth_of_its_rate(slow_pair):
    job = start(slow_pair, "--steps", "30", "--pause-s", "0.01")
    slow_pair.set_rate("n1", "20mbit")
    facts = facts_of(slow_pair.finish(job))
    # The transfer time of 20 messages: some were sent before the link slowed down.
    assert facts["ranks"][0]["seconds"] > 20 * (256 << 13) / 20e6


@pytest.mark.parametrize("mpi", MPIS)
def test_random_collectives_equal_numpy_across_nodes(pair, mpi):
    fuzz = ["python", "-m", "tests.comm.fuzz", "-n", "150"]
    done = pair.run(fuzz, ranks_per_node=(2, 2), order="cyclic", mpi=mpi)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ranks on 2 nodes agree with numpy" in done.stdout


def test_run_survives_a_silent_link_and_reports_it(slow_pair):
    job = start(slow_pair, "--steps", "40", "--pause-s", "0.02")
    slow_pair.silence("n1")
    time.sleep(SILENT_S)
    slow_pair.restore("n1")
    done = slow_pair.finish(job)
    assert facts_of(done)["ranks"][0]["seconds"] > SILENT_S
    warnings = [line for line in done.stderr.splitlines() if "rail" in line]
    assert any("n1" in line for line in warnings), done.stderr


def test_permanently_cut_link_ends_the_run_with_the_name_of_the_node(slow_pair):
    patience = {"HPCTRAIN_TIMEOUT": str(PATIENCE_S)}
    job = start(slow_pair, "--steps", "400", "--pause-s", "0.02", env=patience)
    slow_pair.silence("n1")
    done = slow_pair.finish(job, 30.0)
    assert done.returncode != 0
    assert "n1" in done.stderr
    assert slow_pair.processes() == []
