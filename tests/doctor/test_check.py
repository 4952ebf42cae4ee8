"""Laws of all checks together."""

import pytest

from hpctrain.core.finding import Finding
from hpctrain.doctor.checks.check import few, merge
from hpctrain.doctor.checks.table import examine
from tests.doctor.healthy import BATCH, HEALTHY, INFINIBAND, SRUN, with_


@pytest.mark.parametrize(
    "facts",
    [
        HEALTHY,
        with_(SRUN),
        with_(BATCH),
        with_(SRUN, network={"cards": (INFINIBAND,)}),
        with_(mpi={"srun_types": ("none", "pmi2", "pmix", "pmix_v4")}),
    ],
)
def test_a_healthy_machine_has_no_fault_and_every_check_says_so(facts):
    findings = examine(facts)
    assert {each.level for each in findings} == {"ok"}
    names = {each.check for each in examine(HEALTHY)}
    assert {each.check for each in findings} >= names - {"cores", "threads"}  # ranks compare these


def test_what_is_wrong_says_what_to_do():
    broken = with_(
        {"OMP_NUM_THREADS": "99", "HPCTRAIN_NONSENSE": "1", "CUDA_VISIBLE_DEVICES": "0,0"},
        versions={"torch": None},
        mpi={"error": "no library; load a module"},
        cores={"mask": (3,)},
        memory={"shm_free_bytes": 1, "memfd_error": "refused", "rooms": ()},
        network={"cards": (INFINIBAND,), "copy_error": "no"},
    )
    wrong = [each for each in examine(broken) if each.is_wrong]
    assert len(wrong) >= 8
    assert all(each.do for each in wrong)
    assert any(each.level == "error" for each in wrong)


def finding(level, what="x", check="c"):
    return Finding(check, level, what, "do" if level in ("warning", "error") else "")


def test_merged_findings_name_their_hosts_unless_all_have_them():
    bad, other = finding("error", "bad"), finding("warning", "other", "d")
    found = merge(
        [[bad, finding("ok", check="d")], [bad, other], [bad, other]], ["n0", "n1", "n1"]
    )
    assert found == [bad, finding("warning", "n1: other", "d")]


def test_merged_findings_of_alike_ranks_are_those_of_one():
    findings = examine(HEALTHY)
    assert merge([findings] * 3, ["n0", "n1", "n2"]) == findings


def test_a_thousand_hosts_do_not_drown_a_finding():
    hosts = [f"n{number}" for number in range(1000)]
    of_ranks = [[finding("ok")], *([finding("error")] for _ in hosts[1:])]
    (found,) = merge(of_ranks, hosts)
    assert found.what == "n1, n2, n3, n4 and 995 more: x"


def test_a_finding_of_all_hosts_but_of_one_rank_each_is_not_named():
    assert merge([[finding("note")]] * 2, ["n0", "n0"]) == [finding("note")]


def test_a_fault_of_many_nodes_is_told_for_a_few():
    assert few([finding("error")] * 4) == [finding("error")] * 4
    assert [each.what for each in few([finding("error")] * 9)][3:] == [
        "x",
        "the same 5 times more",
    ]
