"""Check that the table of ``hpctrain guide settings`` equals the table of settings.

``python -m tests.core.test_settings_guide`` rewrites the table in the guide.
"""

import ast
import dataclasses
import inspect
import re
from itertools import pairwise
from pathlib import Path
from types import NoneType
from typing import get_type_hints

from hpctrain.core.checks import alternatives
from hpctrain.core.config import Settings, variable_of

GUIDE = Path(__file__).parents[2] / "hpctrain/guide/settings.md"
HEAD = "| variable | values | default | meaning |\n"
_KINDS = {bool: "`1`, `0`", int: "integer", float: "number", Path: "path"}
_UNITS = {"bytes": "bytes, or a size such as `25 MiB`", "time": "time, such as `10min`"}


def table() -> str:
    """Return the rows of all settings, from their types, defaults and docstrings."""
    hints = get_type_hints(Settings, include_extras=True)
    meanings = _docstrings()
    rows = [
        f"| `{variable_of(field.name)}` | {_values(hints[field.name])} | "
        f"{_default(field.default)} | {meanings[field.name]} |\n"
        for field in dataclasses.fields(Settings)
    ]
    return f"{HEAD}|---|---|---|---|\n{''.join(rows)}"


def _values(hint: object) -> str:
    found = [each for each in alternatives(hint) if each[0] is not NoneType]
    if isinstance(found[0][1], str):
        return ", ".join(f"`{word}`" for _, word in found)
    (kind, rule), *_ = found
    return _UNITS.get(getattr(rule, "unit", ""), _KINDS[kind])


def _default(value: object) -> str:
    return "" if value is None else f"`{int(value) if isinstance(value, bool) else value}`"


def _docstrings() -> dict[str, str]:
    """Return the text below each field."""
    body = ast.parse(inspect.getsource(Settings)).body[0].body
    found = {}
    for field, text in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            found[field.target.id] = re.sub(r"\s+", " ", text.value.value).replace("``", "`")
    return found


def test_the_guide_has_the_table_of_settings():
    assert table() in GUIDE.read_text("utf-8"), (
        "the guide differs from the settings: run `python -m tests.core.test_settings_guide`"
    )


if __name__ == "__main__":
    old = re.compile(re.escape(HEAD) + r"(\|.*\n)*")
    GUIDE.write_text(old.sub(lambda _: table(), GUIDE.read_text("utf-8")), "utf-8")
