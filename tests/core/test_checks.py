"""Check arguments and fields of configurations against type hints."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from hpctrain.core import checks
from hpctrain.core.checks import CheckedFields, checked, require_values
from hpctrain.core.errors import ConfigError
from hpctrain.train.run_config import RunConfig

ALLOWED = [
    (checks.Count, [0, 7, np.int64(7)], [-1, True, 1.0, "1", None]),
    (checks.Number | None, [1, None], [0, False]),
    (checks.Positive, [1e-9, 2, math.inf, np.float64(1)], [0, -1.0, math.nan, True, "1"]),
    (checks.Amount, [1.5], [math.inf, 0.0]),
    (checks.Fraction, [1, 0.5], [0, 1.1]),
    (checks.Decay, [0, 0.99], [1.0, -0.1]),
    (checks.Time, ["10min", ""], ["often", 10]),
    (checks.Size, ["25 MiB"], ["0B", "big", 25]),
    (checks.Texts, [["a"], []], [[1], "a", None]),
    (bool, [True], [1, "true"]),
    (Path | None, [Path("a"), None], ["a"]),
    (Mapping[str, Any], [{}, {"a": 1}], [[], "a"]),
    (Literal["test", "never"] | checks.Number, ["test", 3], ["tes", 0, True]),
]


@pytest.mark.parametrize(("hint", "good", "bad"), ALLOWED)
def test_a_hint_allows_its_values_only_and_an_error_has_name_and_value(hint, good, bad):
    for value in good:
        assert checked("key", value, hint) == value
    for value in bad:
        with pytest.raises(ConfigError, match=r"^key") as caught:
            checked("key", value, hint)
        assert repr(value) in str(caught.value) or repr(float(value)) in str(caught.value)


def test_every_field_of_a_run_is_checked_when_a_program_makes_its_table():
    tables = [type(getattr(RunConfig(), item.name)) for item in fields(RunConfig)]
    for cls in (RunConfig, *filter(lambda each: issubclass(each, CheckedFields), tables)):
        for item in fields(cls):
            with pytest.raises(ConfigError, match=rf"^{cls.table}\.?{item.name}\b"):
                cls(**{item.name: object()})


def test_conflicting_values_are_reported_with_both_keys():
    @dataclass(frozen=True)
    class Pair:
        a: int
        b: str

    rules = {"a": ((0, 1), "b decides"), "b": ("x", "it is so; set x")}
    require_values(Pair(1, "x"), "c = true", rules)
    with pytest.raises(ConfigError, match=r"with c = true, because b decides, got 2; omit"):
        require_values(Pair(2, "x"), "c = true", rules)
    with pytest.raises(ConfigError, match=r"because it is so, got 'y'; set x$"):
        require_values(Pair(0, "y"), "c = true", rules)
