"""Check Horovod's environment variables: used if hpctrain has an equivalent, else reported."""

import math
import re
from dataclasses import fields
from importlib import resources
from pathlib import Path

import pytest

from hpctrain.core import config
from hpctrain.core.config import Settings
from hpctrain.core.errors import ConfigError
from hpctrain.core.horovod_variables import FULFILLED, HONOURED, remarks

GUIDE = resources.files("hpctrain.guide").joinpath("horovod-variables.md").read_text("utf-8")
ROWS = re.findall(r"^\| `(HOROVOD_\w+)` \| (.*?) \|", GUIDE, re.MULTILINE)


MEANT = [
    (
        "timeline",
        {"TIMELINE": {"out/{rank}.json": Path.cwd() / "out/{rank}.json", "DYNAMIC": None}},
    ),
    ("timeline", {"TIMELINE": {"": None}}),
    ("timeline_mark_cycles", {"TIMELINE_MARK_CYCLES": {"1": True, "0": False}}),
    ("fusion_bytes", {"FUSION_THRESHOLD": {"33554432": 33554432, "0": 0}}),
    ("cycle_s", {"CYCLE_TIME": {"3.5": 0.0035, "0": 0.0}}),
    ("stall_s", {"STALL_CHECK_DISABLE": {"1": math.inf, "0": 30.0}}),
    ("stall_s", {"STALL_CHECK_TIME_SECONDS": {"7": 7.0}}),
    ("stall_abort_s", {"STALL_SHUTDOWN_TIME_SECONDS": {"90": 90.0, "0": math.inf}}),
    ("log_level", {"LOG_LEVEL": {"TRACE": "debug", "error": "error", "fatal": "critical"}}),
]


@pytest.mark.parametrize(("setting", "variables"), MEANT)
def test_a_variable_with_a_meaning_here_is_a_setting(setting, variables):
    for name, values in variables.items():
        for text, value in values.items():
            read = getattr(Settings.from_env({f"HOROVOD_{name}": text}), setting)
            assert (read, type(read)) == (value, type(value)), text


def test_hpctrain_variables_take_precedence_over_horovod():
    both = {"HPCTRAIN_STALL_S": "5", "HOROVOD_STALL_CHECK_TIME_SECONDS": "7"}
    assert config.read(both) == {"stall_s": (5.0, "HPCTRAIN_STALL_S")}
    theirs = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "7", "HOROVOD_STALL_CHECK_DISABLE": "0"}
    assert config.read(theirs) == {"stall_s": (7.0, "HOROVOD_STALL_CHECK_TIME_SECONDS")}


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("HOROVOD_FUSION_THRESHOLD", "many"),
        ("HOROVOD_CYCLE_TIME", "-1"),
        ("HOROVOD_STALL_CHECK_TIME_SECONDS", "nan"),
        ("HOROVOD_STALL_CHECK_DISABLE", "yes"),
        ("HOROVOD_LOG_LEVEL", "loud"),
    ],
)
def test_a_wrong_value_is_refused_by_the_name_of_its_variable(variable, text):
    with pytest.raises(ConfigError, match=variable) as caught:
        Settings.from_env({variable: text})
    assert repr(text) in str(caught.value)


def test_settings_of_variables_exist_and_keep_their_types():
    assert {variable.setting for variable in HONOURED} <= {
        field.name for field in fields(Settings)
    }
    assert len({variable.name for variable in HONOURED}) == len(HONOURED)


def test_all_other_variables_that_are_set_get_one_line():
    environ = {"HOROVOD_NUM_NCCL_STREAMS": "2", "HOROVOD_CMAKE": "/bin/cmake", "HOME": "/"}
    (text,) = remarks(environ | {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_AUTOTUNE": "1"})
    assert text == (
        "HOROVOD_CMAKE, HOROVOD_NUM_NCCL_STREAMS have no effect in hpctrain; "
        "see `hpctrain guide horovod-variables`"
    )
    assert remarks({"HOME": "/"}) == []
    assert config.remarks(environ | {"HPCTRAIN_X": "1"})[1:] == remarks(environ)


def test_a_misspelt_variable_gets_a_hint():
    (text,) = remarks({"HOROVOD_FUSION_TRESHOLD": "0", "HOROVOD_CMAKE": "cmake"})
    assert text.endswith(
        "have no effect in hpctrain; is HOROVOD_FUSION_TRESHOLD meant to be "
        "HOROVOD_FUSION_THRESHOLD?"
    )


@pytest.mark.parametrize("variable", FULFILLED)
def test_variables_fulfilled_without_action_are_not_reported(variable):
    assert not remarks({variable: (FULFILLED[variable] or ["1"])[0].upper()})
    assert bool(remarks({variable: "gloo"})) is bool(FULFILLED[variable])


def test_ranks_that_were_started_for_gloo_get_the_right_command():
    started = {"HOROVOD_GLOO_RENDEZVOUS_ADDR": "10.0.0.1", "HOROVOD_RANK": "0"}
    (text,) = remarks(started | {"HOROVOD_SIZE": "4"})
    assert "started 4 processes for Gloo" in text
    assert "`hpctrain launch`" in text


def test_the_guide_has_a_row_for_each_and_agrees():
    assert len(dict(ROWS)) == len(ROWS)
    output = {name: what for name, what in ROWS if what != "none"}
    read = {each.name: f"`HPCTRAIN_{each.setting.upper()}`" for each in HONOURED}
    assert output == read | dict.fromkeys(FULFILLED, "always")
