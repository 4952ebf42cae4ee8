"""Check that all tests that the Makefile names exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
SELECTED = re.compile(r"(tests/\S*test_\w+\.py)(?:[^\n\\]*?-k (\w+))?")


def test_selected_files_and_names_exist():
    found = SELECTED.findall((ROOT / "Makefile").read_text())
    assert len(found) > 8
    for file, name in found:
        text = (ROOT / file).read_text()
        assert re.search(rf"def test_\w*{name}", text), (file, name)


def test_variables_that_lengthen_tests_are_read():
    names = set(re.findall(r"\bTEST_\w+", (ROOT / "Makefile").read_text()))
    texts = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert len(names) > 5
    assert {name for name in names if f'"{name}"' not in texts} == set()
