"""Check that files have at most 500 lines and functions at most 60 without their docstrings."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

EXCEPTIONS = {
    "hpctrain/train/run_config.py": "one file has every key of a run and its sentence",
}
"""``"path"`` or ``"path:function"`` and why it may be longer."""

FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for folder in ("hpctrain", "tests", "examples", "perf")
    for path in (ROOT / folder).rglob("*.py")
)


def docstring_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = node.body[0]
    has_one = ast.get_docstring(node, clean=False) is not None
    return (first.end_lineno or first.lineno) - first.lineno + 1 if has_one else 0


def too_long(name: str, text: str) -> list[str]:
    found = [(name, len(text.splitlines()), MAX_FILE_LINES)]
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1 - docstring_lines(node)
            found.append((f"{name}:{node.name}", length, MAX_FUNCTION_LINES))
    return [
        f"{what} has {length} lines, at most {limit} are allowed; cut it, or list it with a reason"
        for what, length, limit in found
        if length > limit and what not in EXCEPTIONS
    ]


def test_files_and_functions_are_short():
    assert [fault for name in FILES for fault in too_long(name, (ROOT / name).read_text())] == []


def test_long_files_and_functions_are_found():
    function = "def long():\n" + "    pass\n" * MAX_FUNCTION_LINES
    assert len(too_long("f.py", function)) == 1
    documented = 'def f():\n    """First.\n\n    Second.\n    """\n'
    assert too_long("f.py", documented + "    pass\n" * (MAX_FUNCTION_LINES - 1)) == []
    assert len(too_long("f.py", function * 9)) == 10
    assert too_long("f.py", "x = 1\n" * MAX_FILE_LINES) == []


def test_exceptions_exist_and_give_a_reason():
    for what, reason in EXCEPTIONS.items():
        assert what.split(":", maxsplit=1)[0] in FILES
        assert len(reason.split()) > 3
