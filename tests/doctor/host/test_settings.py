from dataclasses import fields

from hpctrain.core.config import Settings
from hpctrain.doctor.host.settings import check
from tests.doctor.host.healthy import HEALTHY, only, with_


def test_every_setting_is_told_with_where_it_comes_from():
    findings = check(with_({"HPCTRAIN_TIMEOUT": "7"}))
    assert len(findings) == len(fields(Settings))
    assert {each.level for each in findings} == {"ok"}
    texts = [each.what for each in findings]
    assert "timeout = 7.0, from HPCTRAIN_TIMEOUT" in texts
    assert "shared_memory = auto, the default" in texts
    assert all(each.what.endswith("the default") for each in check(HEALTHY))


def test_a_setting_that_comes_from_a_variable_of_horovods_is_told_so():
    findings = check(with_({"HOROVOD_CYCLE_TIME": "5"}))
    assert "cycle_s = 0.005, from HOROVOD_CYCLE_TIME" in [each.what for each in findings]
    assert {each.level for each in findings} == {"ok"}


def test_a_variable_of_horovods_without_a_meaning_is_a_note():
    found = check(with_({"HOROVOD_CMAKE": "/bin/cmake"}))[0]
    assert (found.level, found.what) == ("note", "HOROVOD_CMAKE has no effect in hpctrain")
    assert found.do == "`hpctrain guide horovod-variables` says why"


def test_a_value_that_is_not_valid_is_an_error():
    found = only(check(with_({"HPCTRAIN_TIMEOUT": "soon"})))
    assert found.level == "error"
    assert "HPCTRAIN_TIMEOUT" in found.what


def test_a_variable_that_nothing_reads_is_a_warning():
    found = check(with_({"HPCTRAIN_TIMEOUTS": "7"}))[0]
    assert found.level == "warning"
    assert found.do == "unset HPCTRAIN_TIMEOUTS: did you mean HPCTRAIN_TIMEOUT?"
