"""Check errors of user code: a short report; errors of hpctrain are reported completely."""

import numpy as np
import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.core.python_compat import add_note
from hpctrain.core.units import parse_seconds
from hpctrain.core.user_error import MAX_LINES, folded, noted


def deep(depth, x):
    if depth:
        return deep(depth - 1, x)
    raise ValueError("\n".join(f"line {number}" for number in range(40)))


def output(action, *words):
    with pytest.raises(Exception) as raised:  # noqa: PT011 - of any kind
        action(*words)
    return folded(raised.value, None)


def test_the_innermost_frames_and_their_arrays_are_reported_in_twelve_lines():
    lines = output(deep, 20, np.zeros((2, 3), "float32")).splitlines()
    assert len(lines) == MAX_LINES
    assert "in deep: raise ValueError" in lines[2]
    assert lines[3] == "  where x float32 (2, 3)"
    assert lines[4] == "ValueError: line 0"


def test_a_frame_without_source_has_no_line_and_notes_fit_in_twelve_lines():
    def launched():
        exec("noted_deep(x)", {"x": np.zeros(2), "noted_deep": noted_deep})

    def noted_deep(x):
        with noted("mine.key", x, {"y": x}):
            try:
                deep(0, x)
            except ValueError as error:
                add_note(error, "\n".join(map(str, range(40))))
                raise

    lines = output(launched).splitlines()
    assert len(lines) == MAX_LINES
    assert not any(line.startswith("<string>") for line in lines)
    assert "ValueError: line 0" in lines


def test_error_report_names_function_and_arguments():
    def called():
        with noted("mine.key", np.zeros(2, "int32"), {"y": [1]}):
            deep(0, 0)

    assert "mine.key was given numpy int32 (2,) and y a list of an int" in output(called)


def test_an_error_of_ours_for_users_is_folded_and_a_fault_of_ours_is_not():
    assert "ConfigError" in output(parse_seconds, "soon")
    assert output(parse_seconds, {}) == ""


def test_a_syntax_error_shows_the_line():
    text = output(compile, "x = (1,\ny = 2\n", "mine.py", "exec")
    assert 'File "mine.py", line 1' in text


def test_an_object_that_fails_inspection_is_omitted():
    class Bad:
        @property
        def shape(self):
            raise ConfigError("no")

    assert "where" not in output(deep, 0, Bad())
