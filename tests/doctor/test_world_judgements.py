"""Check judgements of the facts of all ranks, which need no real machine."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from hpctrain.cluster.env import launched
from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.core.config import Settings
from hpctrain.doctor.checks import environment, gpus, job, network, node
from hpctrain.doctor.checks.facts import (
    Carried,
    MeasuredLink,
    TrafficFacts,
    VisibleGpus,
    WorldFacts,
)
from hpctrain.doctor.ranks.examine_ranks import wrong_interface
from hpctrain.doctor.ranks.traffic import difference, interface_bytes
from tests.doctor.healthy import assert_judged, rank, rows, smi

SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_MPI_TYPE": "pmi2",
}
OPENMPI = {"launched": launched(SRUN), "mpi": "Open MPI v5"}


def world(*ranks, **more):
    """Return a world of ranks, each given by its host or by its facts."""
    parts = {each.name for each in fields(TrafficFacts)} & {*more}
    more["traffic"] = TrafficFacts(**{name: more.pop(name) for name in parts})
    facts = [rank(each) if isinstance(each, str) else each for each in ranks]
    place = Topology.from_facts([RankFacts(host=each.host, cores=(0,)) for each in facts], 0)
    return WorldFacts(ranks=facts, topology=place, **more)


def masks(found):
    return node.check_masks(found.ranks)


def threads(found):
    return node.check_threads(found.ranks)


def bound(host, *mask, granted=4, omp=None, quota=None):
    """Return a rank bound to some cores."""
    environ = {} if omp is None else {"OMP_NUM_THREADS": str(omp)}
    limits = {"mask": mask, "num_granted": granted, "quota": quota}
    return rank(host, environ=environ, cores=limits)


def seeing(*names, host="a", **more):
    return rank(host, visible=VisibleGpus(names=names, **more))


TWO_CARDS = [seeing("a", by_torch=True), seeing("b", by_torch=True)]


def near(*mask):
    """Return a rank on some cores of a machine with four GPUs, all visible to the rank."""
    seen = replace(seeing("a", "b", "c", "d", by_torch=True), **smi())
    return replace(seen, cores=replace(seen.cores, mask=mask))


def carried(host, *, interface=0, card=0, sent=100 << 20, cards=("mlx5_0",)):
    return Carried(
        host=host,
        sent_bytes=sent,
        by_interface={"lo": 1000, "ib0": interface},
        by_adapter={"mlx5_0": card},
        fast_adapters=cards,
    )


def between(nodes, slow_pairs=(), latency_s=20e-6, bytes_per_s=1e9):
    pairs = [(a, b) for a in range(nodes) for b in range(a + 1, nodes)]
    return [
        MeasuredLink(
            ranks=pair,
            latency_s=latency_s,
            bytes_per_s=bytes_per_s / (10 if pair in slow_pairs else 1),
        )
        for pair in pairs
    ]


def clock(other, clock_s):
    link = MeasuredLink(ranks=(0, other), latency_s=1, bytes_per_s=1)
    return replace(link, clock_s=clock_s, clock_error_s=0.01)


def sent(**counts):
    return {"carried": [carried(host, **counts) for host in "ab"]}


TABLE = {
    job.check_world: [
        (
            world(*"aabb", **OPENMPI),
            "ok",
            "one world of 4 ranks on 2 nodes, started by srun --mpi=pmi2, Open MPI v5",
        ),
        (world(*"ab", **OPENMPI), "warning", "SLURM_STEP_NUM_TASKS=4"),
        (world("a"), "ok", "1 rank on 1 node, no launcher"),
    ],
    job.check_nodes: [
        (world(*"aabb"), "ok", "2 on every node"),
        (world(*"aaab"), "warning", "1 to 3 ranks, fewest on b"),
    ],
    job.check_level: [
        (world(*"aa"), "ok", ""),
        (
            world("a", rank(mpi={"thread_level": "SERIALIZED"})),
            "warning",
            "MPI_THREAD_SERIALIZED to rank 1",
        ),
    ],
    masks: [
        (
            world(bound("a", 3), bound("a", 3)),
            "warning",
            "ranks 0-1 on a share 1 core (mask 3)",
        ),
        (
            world(bound("a", 3), *[bound("b", 0, 1, 2, 3)] * 2),
            "warning",
            "rank 0 on a may use 1 of 4 cores (mask 3)",
        ),
        (world(bound("a", 2, 3, granted=8), bound("b", 0)), "note warning", "rank 1 on b"),
        (world(bound("a", 0, 1), bound("a", 2, 3)), "ok", "a: rank 0 on 0-1, rank 1 on 2-3"),
        (world(*[bound("a", 0, 1, 2, 3)] * 2), "ok", ""),
        (world(*(bound("a", core) for core in range(3))), "ok", "1 for each rank"),
    ],
    threads: [
        (world(bound("a", 0, 1, omp=2), bound("a", 2, 3, omp=2)), "ok", ""),
        (
            world(bound("a", 0, 1, omp=3), bound("a", 2, 3, omp=1)),
            "warning note",
            "OMP_NUM_THREADS=1, but a rank has 2 cores (rank 1)",
        ),
        (world(*[bound("a", 0, 1, omp=2)] * 2), "warning", "the cores of a rank, 1, got 2"),
        (
            world(*[bound("a", 0, 1, omp=1)] * 3),
            "ok",
            "",
        ),  # too many ranks are covered by another check
        (
            world(*[bound("a", 0, 1, 2, 3, omp=4, quota=2.0)] * 1),
            "warning",
            "cores of a rank, 2, got 4",
        ),
        (world(bound("a", 0), bound("a", 0)), "ok", ""),
    ],
    gpus.check_nccl: [
        (world("a", "b"), "ok", "torch sees no GPU"),
        (world(*TWO_CARDS, nccl=("2.28.9", "")), "ok", "NCCL 2.28.9 could sum"),
        (
            world(*TWO_CARDS, nccl=("", "of wood")),
            "note",
            "cannot sum gradients of all ranks: of",
        ),
        (
            world(*TWO_CARDS, nccl=("", "old"), settings=Settings(device_sums="nccl")),
            *("error", "unset HPCTRAIN_DEVICE_SUMS"),
        ),
    ],
    gpus.check_own_gpus: [
        (world(seeing(), seeing()), "ok", "no rank sees a GPU"),
        (world(seeing("0"), seeing("1")), "note", "torch sees none"),
        (world(seeing("0", "1"), seeing("0", "1")), "note", "gives 2 GPUs"),  # by local rank
        (world(seeing("0"), seeing("0")), "warning", "according to the environment"),
        (world(*[seeing("0", "1")] * 3), "warning", "ranks 0,2 on a use GPU 0"),
        (world(seeing("0"), seeing()), "warning", "rank 1 on a see none"),
        (
            world(*(seeing("GPU-7", host=host, by_torch=True) for host in "aabb")),
            "error error",
            "ranks 2-3 on b use GPU GPU-7",
        ),
        (world(*(seeing("GPU-7", host=host, by_torch=True) for host in "ab")), "ok", "own"),
        (
            world(seeing("a", by_torch=True), seeing("b", by_torch=True)),
            "warning",
            "ranks 0-1 on a see different GPUs: the host sums",
        ),
        (
            world(*[seeing("a", "b", by_torch=True, no_peers=((0, 1),))] * 2),
            "warning",
            "but 1 pair on a (0-1) cannot",
        ),
        (world(near(0, 1), near(2, 3), near(4, 5), near(6, 7)), "ok", "its own GPU"),
        (
            world(near(4, 5), near(6, 7), near(0, 1), near(2, 3)),
            "warning",
            "srun --cpu-bind=map_ldom:0,0,1,1",
        ),
        (
            world(*(seeing("0", host=f"n{number // 2}") for number in range(20))),
            "warning warning warning warning warning",
            "6 more findings of this kind",
        ),
    ],
    environment.check_equal_versions: [
        (
            world(*(rank(versions={"torch": text}) for text in "1221")),
            "error",
            "but differs: 1 (ranks 0,3), 2 (ranks 1-2)",
        ),
        (world(*"ab"), "ok", "identical on all ranks: python 3.11.7"),
    ],
    environment.check_equal_settings: [
        (world(*"ab"), "ok", ""),
        (
            world(rank(environ={"HPCTRAIN_PROBE": "off"}), "b"),
            "warning",
            "must be identical on all ranks, but differs: off (rank 0), not set (rank 1)",
        ),
        (world(rank(environ={"HPCTRAIN_LOG_DIR": "x"}), "b"), "ok", ""),
        (world(rank(environ={"UCX_TLS": "tcp"}), "b"), "note", "UCX_TLS must be identical"),
    ],
    node.check_node_memory: [
        (world("a"), "ok", "one rank"),
        (world(*"aa", node_memory="memfd"), "ok", "by memfd"),
        (world(*"aa", node_memory="none", notes=["no room"]), "warning", "no room do: run all"),
        (
            world(*"aa", node_memory="none", settings=Settings(shared_memory="off")),
            "note",
            "HPCTRAIN_SHARED_MEMORY=off: node memory is none",
        ),
        (world(*"aa", engine="horovod"), "note", "Horovod moves the tensors"),
    ],
    network.check_interfaces: [
        (world("a", carried=[carried("a")]), "ok", "one node"),
        (
            world(*"ab", **sent(interface=110 << 20)),
            "warning",
            "but leave a, b by ib0 (TCP), although mlx5_0 is active",
        ),
        (
            world(*"ab", **sent(card=110 << 20)),
            "note",
            "messages between nodes leave by mlx5_0 (2 nodes)",
        ),
        (
            world(*"ab", **sent(interface=110 << 20, cards=())),
            "note",
            "leave by ib0, TCP (2 nodes)",
        ),
        (world(*"ab", **sent(sent=1)), "note", "too few bytes were sent"),
    ],
    network.check_links: [
        *((world(*"abcdefg"[:n], between=between(n)), "note", "pair") for n in (2, 3, 7)),
        *(
            (
                world(
                    *"abcdefgh"[:n],
                    between=between(
                        n, [(a, b) for a in range(n) for b in range(n) if 1 in (a, b)]
                    ),
                ),
                "note warning",
                "slow link: b reaches all other nodes with only",
            )
            for n in (3, 4, 8)
        ),
        (
            world(*"abcde", between=between(5, [(1, 3)])),
            "note warning",
            "slow link: between b and d with ",
        ),
        (
            world(*"ab", between=between(2, bytes_per_s=5e6)),
            "note warning",
            "slow link: between a and b with 20.0 us, 4.8 MiB/s",
        ),
        (world(*"aa", inside=between(2)), "note", "inside a node: 20.0 us latency, 953.7 MiB/s"),
        (world("a"), "", ""),
    ],
    network.check_clocks: [
        (world(*"aa"), "ok", "one node"),
        (
            world(*"abc", between=[clock(1, -40.0), clock(2, 0.1)]),
            "warning",
            "clocks of nodes must agree within 1 s, but b is 40.00 s behind (within 10.00 ms)",
        ),
        (world(*"abc", between=[clock(2, 0.1)]), "ok", "differ by 100.00 ms at most"),
    ],
}


@pytest.mark.parametrize(("check", "facts", "levels", "words"), rows(TABLE))
def test_facts_of_all_ranks_are_judged(check, facts, levels, words):
    assert_judged(check, facts, levels, words)


@pytest.mark.parametrize(
    ("library", "pmi", "is_refused"),
    [
        ("/venv/lib/libmpi.so.40", "pmi2", True),
        ("/venv/lib/libmpi.so.40", "none", True),
        ("/venv/lib/libmpi.so.40", "pmix_v4", False),
        ("/venv/lib/libmpi.so.12", "pmix", True),
        ("/venv/lib/libmpi.so.12", "pmi2", False),
        ("/site/lib/libmpi.so.12", "pmix", False),  # a site may have built it for this interface
    ],
)
def test_a_wheel_below_the_wrong_interface_is_refused(library, pmi, is_refused):
    environ = SRUN | {"SLURM_MPI_TYPE": pmi}
    finding = wrong_interface(launched(environ), Path(library), "/venv")
    assert (finding is not None) == is_refused
    if finding is not None:
        assert finding.level == "error"
        assert f"started 4 ranks with --mpi={pmi}" in finding.what
        assert "srun --mpi=pm" in finding.do


def test_counters_of_the_kernel_are_read(tmp_path):
    table = tmp_path / "dev"
    table.write_text("Inter-| ...\n face |...\n  eth0:  10 1 0 0 0 0 0 0  77 2 0 0 0 0 0 0\n")
    assert interface_bytes(table) == {"eth0": 77}
    assert interface_bytes(tmp_path / "none") == {}
    assert difference({"a": 1, "b": 2}, {"a": 1, "b": 7, "c": 3}) == {"b": 5, "c": 3}


def test_a_link_with_high_latency_is_slow_and_noise_is_not():
    found = between(4)
    late = MeasuredLink(ranks=(0, 1), latency_s=2e-3, bytes_per_s=1e9)
    noisy = MeasuredLink(ranks=(0, 1), latency_s=2e-4, bytes_per_s=0.5e9)
    assert network.slow([late, *found[1:]]) == [late]
    assert network.slow([noisy, *found[1:]]) == []
