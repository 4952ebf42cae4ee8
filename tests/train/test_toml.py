import datetime
import tomllib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.train.toml import dumps

TEXTS = st.text(st.characters(exclude_categories=["Cs"]))
SCALARS = (
    st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | TEXTS
    | st.dates()
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3)
)


@given(VALUES)
def test_what_is_written_is_read_back(value):
    assert tomllib.loads(f"value = {dumps(value)}") == {"value": value}


def test_a_time_is_written_too():
    moment = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
    assert tomllib.loads(f"value = {dumps(moment)}") == {"value": moment}


def test_what_toml_cannot_hold_is_refused():
    with pytest.raises(TypeError, match="TOML has no value for None"):
        dumps(None)
