"""What the checks make of the reports of all ranks: pure, so every machine can be told."""

from pathlib import Path

import pytest

from hpctrain.cluster.env import launched
from hpctrain.cluster.topology import RankFacts, Topology
from hpctrain.doctor.ranks import (
    clocks,
    devices,
    network,
    rank_cores,
    rank_layout,
    speed,
    version_check,
)
from hpctrain.doctor.ranks.all_checks import wrong_interface
from hpctrain.doctor.ranks.links import Link
from hpctrain.doctor.ranks.network import Carried
from hpctrain.doctor.ranks.report import RankReport


def topology(*hosts):
    return Topology.from_facts([RankFacts(host=host, cores=(0,)) for host in hosts], 0)


def one(findings):
    (finding,) = findings
    assert bool(finding.do) == finding.is_wrong
    return finding.level, finding.what


SRUN = {
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_MPI_TYPE": "pmi2",
}


def test_a_world_of_the_launchers_size_is_well():
    level, what = one(rank_layout.check_world(launched(SRUN), topology(*"aabb"), "Open MPI v5"))
    assert level == "ok"
    assert what == "one world of 4 ranks on 2 nodes, started by srun --mpi=pmi2, Open MPI v5"


def test_a_world_of_another_size_is_not():
    level, what = one(rank_layout.check_world(launched(SRUN), topology(*"ab"), "Open MPI v5"))
    assert level == "warning"
    assert "SLURM_STEP_NUM_TASKS=4" in what


@pytest.mark.parametrize(
    ("library", "pmi", "is_refused"),
    [
        ("/venv/lib/libmpi.so.40", "pmi2", True),
        ("/venv/lib/libmpi.so.40", "none", True),
        ("/venv/lib/libmpi.so.40", "pmix_v4", False),
        ("/venv/lib/libmpi.so.12", "pmix", True),
        ("/venv/lib/libmpi.so.12", "pmi2", False),
        ("/site/lib/libmpi.so.12", "pmix", False),  # a site may have built it for this
    ],
)
def test_a_wheel_below_the_wrong_interface_is_refused(library, pmi, is_refused):
    environ = SRUN | {"SLURM_MPI_TYPE": pmi}
    finding = wrong_interface(launched(environ), Path(library), "/venv")
    assert (finding is not None) == is_refused
    if finding is not None:
        assert finding.level == "error"
        assert f"srun --mpi={pmi} started 4 ranks" in finding.what
        assert "srun --mpi=pm" in finding.do


def test_unequal_nodes_are_named():
    assert one(rank_layout.check_nodes(topology(*"aabb"))) == ("ok", "2 on every node")
    level, what = one(rank_layout.check_nodes(topology(*"aaab")))
    assert level == "warning"
    assert "1 to 3 ranks, fewest on b" in what


def test_machines_that_share_a_name_are_told_by_their_ranks():
    reports = [RankReport(host="localhost", machine=machine) for machine in "xxyy"]
    level, what = one(rank_layout.check_hosts(reports))
    assert level == "error"
    assert what.startswith("2 machines are called localhost: ranks 0-1 and ranks 2-3")
    assert one(
        rank_layout.check_hosts(
            [RankReport(host="a", machine="x"), RankReport(host="b", machine="y")]
        )
    )
    assert one(
        rank_layout.check_hosts(
            [RankReport(host="a", machine="x"), RankReport(host="b", machine="x")]
        )
    )


def test_a_low_thread_level_is_told():
    low = RankReport(host="a", thread_level="SERIALIZED")
    level, what = one(rank_layout.check_level([RankReport(host="a"), low], "end"))
    assert level == "warning"
    assert "MPI_THREAD_SERIALIZED to rank 1" in what


def test_a_mask_of_one_core_for_two_ranks_is_told():
    reports = [RankReport(host="a", cores=(3,), num_granted=4)] * 2
    level, what = one(rank_cores.check_masks(reports))
    assert level == "warning"
    assert what == "ranks 0-1 on a take turns on 1 core (mask 3)"


def test_a_mask_of_one_core_where_the_job_has_more_is_told():
    free = RankReport(host="b", cores=(0, 1, 2, 3), num_granted=4)
    narrow = RankReport(host="a", cores=(3,), num_granted=4)
    level, what = one(rank_cores.check_masks([narrow, free, free]))
    assert level == "warning"
    assert what.startswith("rank 0 on a may use 1 of 4 cores (mask 3)")


def test_a_mask_of_several_cores_where_the_job_has_more_is_a_note():
    (finding,) = rank_cores.check_masks([RankReport(host="a", cores=(2, 3), num_granted=8)])
    assert finding.level == "note"


@pytest.mark.parametrize("masks", [[(0, 1), (2, 3)], [(0, 1, 2, 3)] * 2, [(0,), (1,), (2,), (3,)]])
def test_masks_with_a_core_for_each_rank_are_well(masks):
    reports = [RankReport(host="a", cores=mask, num_granted=4) for mask in masks]
    assert one(rank_cores.check_masks(reports))[0] == "ok"


@pytest.mark.parametrize(
    ("threads", "masks", "quota", "level"),
    [
        ([2, 2], [(0, 1), (2, 3)], None, "ok"),
        ([3, 1], [(0, 1), (2, 3)], None, "warning"),
        ([2, 2], [(0, 1), (0, 1)], None, "warning"),
        ([1, 1, 1], [(0, 1)] * 3, None, "ok"),  # too many ranks: another check says so
        ([4], [(0, 1, 2, 3)], 2.0, "warning"),
        ([None, None], [(0,), (0,)], None, "ok"),
    ],
)
def test_threads_are_no_more_than_cores(threads, masks, quota, level):
    reports = [
        RankReport(host="a", cores=mask, threads=number, quota=quota)
        for number, mask in zip(threads, masks, strict=True)
    ]
    assert one(rank_cores.check_threads(reports))[0] == level


@pytest.mark.parametrize(
    ("visible", "level"),
    [
        ([(), ()], "ok"),
        ([("0",), ("1",)], "note"),
        ([("0", "1"), ("0", "1")], "note"),  # each takes that of its local rank
        ([("0",), ("0",)], "warning"),
        ([("0", "1")] * 3, "warning"),
        ([("0",), ()], "warning"),
    ],
)
def test_ranks_of_a_node_take_different_gpus(visible, level):
    reports = [RankReport(host="a", visible=names) for names in visible]
    assert one(devices.check(reports, topology(*"a" * len(visible))))[0] == level


def test_the_same_gpu_for_two_ranks_is_an_error_where_torch_names_it():
    reports = [RankReport(host=host, visible=("GPU-7",), by_torch=True) for host in "aabb"]
    found = devices.check(reports, topology(*"aabb"))
    assert [finding.level for finding in found] == ["error", "error"]
    assert found[1].what == "ranks 2-3 on b take the same GPU GPU-7"
    assert one(devices.check(reports[1:3], topology(*"ab")))[0] == "ok"


def test_gpus_of_the_environment():
    assert devices.visible({"CUDA_VISIBLE_DEVICES": "0, 3"})[0] == ("0", "3")
    assert devices.visible({"CUDA_VISIBLE_DEVICES": ""})[0] == ()
    assert devices.visible({"ROCR_VISIBLE_DEVICES": "1"})[0] == ("1",)


def test_versions_that_differ_are_told_with_their_ranks():
    reports = [RankReport(host="a", versions={"torch": text}) for text in ("1", "2", "2", "1")]
    level, what = one(version_check.check_versions(reports))
    assert (level, what) == ("error", "torch differs: 1 (ranks 0,3), 2 (ranks 1-2)")
    assert one(version_check.check_versions(reports[1:3]))[0] == "ok"


def test_a_setting_that_only_some_ranks_have_is_told():
    reports = [RankReport(host="a", settings={"HPCTRAIN_PROBE": "off"}), RankReport(host="b")]
    level, what = one(version_check.check_settings(reports))
    assert level == "warning"
    assert what == "HPCTRAIN_PROBE differs between ranks, off (rank 0), not set (rank 1)"


def test_tuning_that_differs_is_a_note():
    reports = [RankReport(host="a", tuning={"UCX_TLS": "tcp"}), RankReport(host="b")]
    (finding,) = version_check.check_settings(reports)
    assert finding.level == "note"


def carried(host, *, interface=0, card=0, sent=100 << 20, cards=("mlx5_0",)):
    return Carried(
        host=host,
        sent_bytes=sent,
        by_interface={"lo": 1000, "ib0": interface},
        by_card={"mlx5_0": card},
        fast_cards=cards,
    )


def test_messages_by_tcp_where_infiniband_is_are_told():
    level, what = one(network.check([carried(h, interface=110 << 20) for h in "ab"]))
    assert level == "warning"
    assert what.startswith("messages leave a, b by ib0 (TCP), while mlx5_0 is there")


def test_messages_by_infiniband_are_well():
    found = network.check([carried(h, card=110 << 20) for h in "ab"])
    assert one(found) == ("note", "messages between nodes leave by mlx5_0 (2 nodes)")


def test_ethernet_is_well_where_there_is_nothing_faster():
    found = network.check([carried(h, interface=110 << 20, cards=()) for h in "ab"])
    assert one(found) == ("note", "messages between nodes leave by ib0, TCP (2 nodes)")


def test_counters_of_the_kernel_are_read(tmp_path):
    table = tmp_path / "dev"
    table.write_text("Inter-| ...\n face |...\n  eth0:  10 1 0 0 0 0 0 0  77 2 0 0 0 0 0 0\n")
    assert network.interface_bytes(table) == {"eth0": 77}
    assert network.interface_bytes(tmp_path / "none") == {}
    assert network.difference({"a": 1, "b": 2}, {"a": 1, "b": 7, "c": 3}) == {"b": 5, "c": 3}


def links(nodes, slow_pairs, latency_s=20e-6, bytes_per_s=1e9, factor=10.0):
    return [
        Link(
            ranks=(a, b),
            latency_s=latency_s,
            bytes_per_s=bytes_per_s / (factor if (a, b) in slow_pairs else 1.0),
        )
        for a in range(nodes)
        for b in range(a + 1, nodes)
    ]


def test_equal_links_are_well():
    for nodes in (2, 3, 7):
        assert one(speed.check(links(nodes, ()), topology(*"abcdefg"[:nodes])))[0] == "note"


@pytest.mark.parametrize("nodes", [3, 4, 8])
def test_a_node_with_a_slow_link_is_named(nodes):
    slow = [(a, b) for a in range(nodes) for b in range(a + 1, nodes) if 1 in (a, b)]
    note, fault = speed.check(links(nodes, slow), topology(*"abcdefgh"[:nodes]))
    assert note.level == "note"
    assert fault.level == "warning"
    assert "slow link: b reaches every other node only with" in fault.what
    assert "--exclude=b" in fault.do


def test_a_slow_pair_is_named():
    _, fault = speed.check(links(5, [(1, 3)]), topology(*"abcde"))
    assert fault.what.startswith("slow link: between b and d with ")


def test_links_that_are_all_slow_are_told_by_pairs():
    _, fault = speed.check(links(2, [], bytes_per_s=5e6), topology(*"ab"))
    assert fault.what.startswith("slow link: between a and b with 20.0 us, 4.8 MiB/s")


def test_late_links_are_slow_too_and_noise_is_not():
    found = links(4, ())
    late = Link(ranks=(0, 1), latency_s=2e-3, bytes_per_s=1e9)
    noisy = Link(ranks=(0, 1), latency_s=2e-4, bytes_per_s=0.5e9)
    assert speed.slow([late, *found[1:]]) == [late]
    assert speed.slow([noisy, *found[1:]]) == []


def test_clocks_that_differ_are_told_by_node():
    found = [
        Link(ranks=(0, 1), latency_s=1, bytes_per_s=1, clock_s=-40.0, clock_error_s=0.01),
        Link(ranks=(0, 2), latency_s=1, bytes_per_s=1, clock_s=0.1, clock_error_s=0.01),
    ]
    level, what = one(clocks.check(found, topology(*"abc")))
    assert level == "warning"
    assert what == "the clocks of the nodes differ: b is 40.00 s behind (within 10.00 ms)"
    assert one(clocks.check(found[1:], topology(*"abc")))[0] == "ok"


def test_a_fault_of_many_nodes_is_told_for_a_few():
    reports = [RankReport(host=f"n{i // 2}", visible=("0",)) for i in range(20)]
    found = devices.check(reports, topology(*(report.host for report in reports)))
    assert [finding.what for finding in found][-1] == "the same 6 times more"
    assert len(found) == 5
