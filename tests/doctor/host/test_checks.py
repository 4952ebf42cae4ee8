"""Laws of all checks together."""

import pytest

from hpctrain.core.finding import LEVELS, Finding, worst
from hpctrain.doctor.host.checks import examine
from hpctrain.doctor.host.gather import gather, srun_types_of
from hpctrain.doctor.host.merge import merge
from tests.doctor.host.healthy import BATCH, HEALTHY, INFINIBAND, SRUN, with_


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
    assert {each.check for each in findings} == {each.check for each in examine(HEALTHY)}


def test_what_is_wrong_says_what_to_do():
    broken = with_(
        {"OMP_NUM_THREADS": "99", "HPCTRAIN_NONSENSE": "1", "CUDA_VISIBLE_DEVICES": "0,0"},
        versions={"torch": None},
        mpi={"error": "no library; load a module"},
        cores={"mask": (3,)},
        memory={"shm_free_bytes": 1, "memfd_error": "refused", "rooms": ()},
        network={"cards": (INFINIBAND,), "memlock_bytes": 1, "copy_error": "no", "kernel": (3,)},
    )
    wrong = [each for each in examine(broken) if each.is_wrong]
    assert len(wrong) >= 10
    assert all(each.do for each in wrong)
    assert worst(wrong) == "error"


def test_the_worst_of_nothing_is_ok():
    assert worst([]) == "ok"
    assert [worst([Finding("a", level, "")]) for level in LEVELS] == list(LEVELS)


def test_this_machine_has_no_error():
    """A warning may be true of it: tests may run on one core, with any variables."""
    errors = [each for each in examine(gather()) if each.level == "error"]
    assert errors == []


def test_gathering_lightly_leaves_out_what_is_the_same_for_a_node():
    facts = gather(lightly=True)
    assert facts.mpi.library is None
    assert facts.memory.leftovers == ()
    assert facts.cores.mask


@pytest.mark.parametrize(
    "text",
    [
        "srun: MPI types are...\nsrun: none\nsrun: pmi2\nsrun: pmix (pmix_v4)\n",
        "MPI plugin types are...\n\tnone\n\tpmi2\n\tpmix\nspecific pmix plugins: pmix_v4\n",
        "srun: MPI types are...\nnone\npmi2\npmix\npmix_v4\n",
    ],
)
def test_what_srun_offers_is_read_from_old_and_new_slurm(text):
    assert {"none", "pmi2", "pmix"} <= set(srun_types_of(text))
    assert "types" not in srun_types_of(text)


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
    assert found.what == "n1, n2, n3 and 996 more: x"


def test_a_finding_of_all_hosts_but_of_one_rank_each_is_not_named():
    assert merge([[finding("note")]] * 2, ["n0", "n0"]) == [finding("note")]
