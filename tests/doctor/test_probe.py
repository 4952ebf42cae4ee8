"""Check all checks together on real ranks, healthy or with inserted faults."""

import os

import pytest

import hpctrain
from hpctrain.comm import mpi_world
from hpctrain.core.finding import Finding
from hpctrain.doctor.host.gather import gather
from hpctrain.doctor.ranks import examine_ranks as module
from hpctrain.doctor.ranks import traffic

SIZES = pytest.mark.ranks(1, 2, 3, 4)
TOGETHER = pytest.mark.ranks(2, 3, 4)

CHECKS = {
    "world",
    "ranks per node",
    "versions",
    "settings",
    "MPI threads",
    "cores",
    "threads",
    "GPUs",
    "node memory",
    "network",
    "clocks",
    "plan",
}
"""What all ranks are judged by."""


def probe(seconds=5.0):
    return module.probe(gather(lightly=True), seconds=seconds)


def faults(findings, num_ranks):
    """Return the faults, except missing features of this machine and busy links."""
    tolerated = {"links", "memory"}
    if len(os.sched_getaffinity(0)) < num_ranks:
        tolerated |= {"cores", "threads"}
    return [f for f in findings if f.is_wrong and f.check not in tolerated]


def output(findings, check):
    return [f"{f.level}: {f.what}" for f in findings if f.check == check]


@SIZES
def test_healthy_ranks_have_equal_findings_without_faults(world):
    findings = probe()
    assert faults(findings, world.size) == []
    assert {finding.check for finding in findings} > CHECKS
    assert world.allgather(findings) == [findings] * world.size
    assert all(finding.do for finding in findings if finding.is_wrong)


@TOGETHER
def test_pairs_of_nodes_are_measured_inside_a_joined_world(world, monkeypatch):
    monkeypatch.setenv("HPCTRAIN_RANKS_PER_NODE", "1")
    hpctrain.init()
    try:
        findings = probe()
        hpctrain.barrier()
    finally:
        hpctrain.shutdown()
    pairs = world.size * (world.size - 1) // 2
    assert f"by {pairs} pair" in " ".join(output(findings, "links"))
    assert "nodes differ by" in " ".join(output(findings, "clocks"))
    assert faults(findings, world.size) == []
    monkeypatch.setattr(traffic, "FEWEST_ROUNDS", 1)
    findings = probe(seconds=0.0)  # time for one round only
    assert f"by {world.size // 2} pair" in " ".join(output(findings, "links"))


@TOGETHER
def test_setting_of_one_rank_is_reported_with_the_rank(world, monkeypatch):
    if world.rank == 1:
        monkeypatch.setenv("HPCTRAIN_TIMEOUT", "soon")
    invalid, different = output(probe(seconds=0.0), "settings")
    assert invalid.startswith("error: HPCTRAIN_TIMEOUT must be ")
    assert "HPCTRAIN_TIMEOUT must be identical on all ranks, but differs" in different
    assert "soon (rank 1)" in different


@SIZES
def test_an_unreadable_plan_is_an_error_and_other_checks_continue(monkeypatch):
    monkeypatch.setenv("HPCTRAIN_PLAN", "/no/such/plan.json")
    findings = probe(seconds=0.0)
    first, *rest = output(findings, "plan")
    assert first.startswith("error: ")
    assert "/no/such/plan.json" in first
    assert rest
    assert output(findings, "clocks")


@TOGETHER
def test_disabled_node_memory_is_not_a_fault(monkeypatch):
    monkeypatch.setenv("HPCTRAIN_SHARED_MEMORY", "off")
    assert output(probe(seconds=0.0), "node memory") == [
        "note: HPCTRAIN_SHARED_MEMORY=off: gradients of a node are sent by MPI",
        "note: HPCTRAIN_SHARED_MEMORY=off: node memory is none",
    ]


@pytest.mark.ranks(1)
def test_a_wrong_interface_raises_before_mpi_starts(monkeypatch):
    refusal = Finding("world", "error", "no world", "another launch")
    monkeypatch.setattr(module, "wrong_interface", lambda *_: refusal)
    monkeypatch.setattr(mpi_world, "find_world", None)
    assert probe()[-1] == refusal


@pytest.mark.ranks(1)
def test_a_world_of_one_in_a_launch_of_several_ranks_raises_with_a_remedy(monkeypatch):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    finding = probe()[-1]
    assert (finding.check, finding.level) == ("world", "error")
    assert "started 4 ranks" in finding.what
    assert "start again with" in finding.do
