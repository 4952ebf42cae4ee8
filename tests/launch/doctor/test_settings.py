from dataclasses import fields

from hpctrain.config import Settings
from hpctrain.launch.doctor.settings import check
from tests.launch.doctor.healthy import HEALTHY, only, with_


def test_every_setting_is_told_with_where_it_comes_from():
    findings = check(with_({"HPCTRAIN_TIMEOUT": "7"}))
    assert len(findings) == len(fields(Settings))
    assert {each.level for each in findings} == {"ok"}
    texts = [each.what for each in findings]
    assert "timeout = 7.0, from HPCTRAIN_TIMEOUT" in texts
    assert "shared_memory = auto, the default" in texts
    assert all(each.what.endswith("the default") for each in check(HEALTHY))


def test_a_value_that_is_not_valid_is_an_error():
    found = only(check(with_({"HPCTRAIN_TIMEOUT": "soon"})))
    assert found.level == "error"
    assert "HPCTRAIN_TIMEOUT" in found.what


def test_a_variable_that_nothing_reads_is_a_warning():
    found = check(with_({"HPCTRAIN_TIMEOUTS": "7"}))[0]
    assert found.level == "warning"
    assert found.do == "unset HPCTRAIN_TIMEOUTS: did you mean HPCTRAIN_TIMEOUT?"
