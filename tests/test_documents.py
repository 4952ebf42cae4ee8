"""Check documents: links resolve, code compiles, and the changelog has its format."""

import contextlib
import itertools
import re
import shlex
from configparser import ConfigParser
from pathlib import Path

import pytest
from click import Group
from click.exceptions import Exit
from typer.main import get_command

import hpctrain
from hpctrain.cli.main import Command, app
from hpctrain.core.torch_compat import TESTED
from tests.versions import ROWS

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in [
        *ROOT.glob("*.md"),
        *(path for folder in ("hpctrain", "examples", "slurm", "tests", "perf")
          for path in (ROOT / folder).rglob("*.md")),
    ]
)  # fmt: skip


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def headings(text: str) -> set[str]:
    """Return the anchors that hosting sites make of headings."""
    found = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in found}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_relative_links_resolve(document):
    prose = re.sub(r"^```.*?^```", "", text_of(document), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / document).parent / path if path else ROOT / document
        assert file.exists(), f"{document} links to {target}"
        assert not anchor or anchor in headings(file.read_text()), f"{document} links to {target}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_python_blocks_compile(document):
    for number, block in enumerate(
        re.findall(r"^```python\n(.*?)^```", text_of(document), re.MULTILINE | re.DOTALL)
    ):
        compile(block, f"{document} block {number}", "exec")


def test_the_architecture_page_names_every_package_and_existing_files():
    text = text_of("hpctrain/guide/architecture.md")
    packages = {path.parent.name for path in (ROOT / "hpctrain").glob("*/__init__.py")}
    named = set(re.findall(r"^\| `([a-z_]+)` \|", text, re.MULTILINE))
    assert named == packages - {"guide"}
    files = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+)`", text)) - {"tests/negotiation"}
    assert len(files) > 30
    for name in files:
        path = ROOT / "hpctrain" / name
        assert path.with_suffix(".py").exists() or path.is_dir(), name


def test_the_page_on_a_step_names_existing_functions():
    block = text_of("hpctrain/guide/step.md").split("\n\n")[2]
    for line in block.splitlines():
        path, names = re.search(r"(\S+\.py)\s+([^:;]+)", line).groups()
        code = text_of(f"hpctrain/{path}")
        for name in re.split(r", ", names):
            kinds = [rf"^class {part}\b|def {part}\b" for part in name.strip().split(".")]
            assert all(re.search(kind, code, re.MULTILINE) for kind in kinds), (path, name)
    numbers = re.findall(r"^ +(\d+) ", block, re.MULTILINE)
    assert numbers == [f"{number}" for number in range(1, 15)]


def test_the_readme_is_short():
    assert len(text_of("README.md").split()) <= 1200


def test_the_changelog_begins_with_this_version():
    versions = re.findall(r"^## (\S+)", text_of("CHANGELOG.md"), re.MULTILINE)
    assert versions[0] == hpctrain.__version__


def test_citation_and_recipes_have_this_version():
    for name in ("CITATION.cff", "examples/recipes/spack_package.py"):
        assert re.findall(r"\bversion\W+([\d.]+\w*)", text_of(name))[-1] == hpctrain.__version__
    assert len(text_of("CONTRIBUTING.md").splitlines()) <= 75


def test_the_first_screen_of_the_readme_has_the_main_job_and_the_tests_with_their_durations():
    screen = text_of("README.md").splitlines()[:20]
    for target in ("demo", "test"):
        assert any(re.search(rf"^    make {target} .*: \d+ minutes$", line) for line in screen)


def test_each_change_is_one_line_that_ends_with_a_full_stop():
    for line in text_of("CHANGELOG.md").splitlines():
        if line.startswith("- "):
            assert line.endswith("."), line


def test_the_table_of_versions_has_all_rows_and_the_tested_range_of_torch():
    text = text_of("hpctrain/guide/versions.md")
    rows = re.findall(r"^\| `([\w.-]+)` \|", text, re.MULTILINE)
    assert set(rows) == {row.name for row in ROWS}
    settings = ConfigParser()
    settings.read(ROOT / "setup.cfg")
    asked = settings["options"]["install_requires"]
    (low,) = re.findall(r"^torch>=([\d.]+)$", asked, re.MULTILINE)  # no upper bound
    tested = re.findall(r"torch ([\d.]+)\+\w+, [^|]*\| (?:all tests|demo: ok)", text)
    numbers = [tuple(map(int, each.split(".")[:2])) for each in tested]
    assert (min(numbers), max(numbers)) == TESTED
    assert low == ".".join(map(str, TESTED[0]))


# Commands

MANUAL = ["README.md", *(d for d in DOCUMENTS if d.startswith("hpctrain/guide/"))]
SHELL = re.compile(r"^```(?:sh|bash)?\n(.*?)^```|((?:^ {4}.*\n)+)", re.MULTILINE | re.DOTALL)
OTHER = re.compile(r"^```(?!sh\n|bash\n)\w+\n.*?^```", re.MULTILINE | re.DOTALL)
OF_READERS = {
    *("train.py", "script.py", "my.toml", "horovod_script.py", "digits.toml", "machine.toml"),
    *("cluster.toml", "model.toml"),
}
"""Files that a reader has: of a script, a configuration or a machine of their own."""


def test_pip_installs_the_current_directory_of_a_clone():
    # In the clone, ./hpctrain is the folder of the package, which pip cannot install.
    for document in DOCUMENTS:
        assert not re.search(r"pip install \S*\./hpctrain", text_of(document)), document


def commands_of(document: str) -> list[list[str]]:
    """Return the words of each command of the manual that starts hpctrain or Python, in order."""
    text = re.sub(
        r"^```(?!sh\n|bash\n|\n)\w+\n.*?^```",
        "",
        text_of(document),
        flags=re.MULTILINE | re.DOTALL,
    )
    lines = []
    for fenced, indented in SHELL.findall(text):
        lines += (fenced or indented).replace("\\\n", " ").splitlines()
    found = []
    for line in (line.strip() for line in lines):
        if re.match(r"([A-Z_]+=\S+ )*(hpctrain|python|mpirun|srun) ", line):
            try:
                words = shlex.split(line, comments=True)
            except ValueError:  # prose that begins with the name of a program
                continue
            found.append([word for word in words if not re.match(r"[A-Z_]+=", word)])
    return found


def parsed(words: list[str]) -> None:
    """Parse the words of a command and of its inner command; run nothing."""
    words = list(itertools.takewhile(lambda word: word not in ("|", "||", "&&", ">", "<"), words))
    command, context = get_command(app), None
    if words[0] != "hpctrain":
        return
    rest = words[1:]
    while isinstance(command, Group):
        name = rest.pop(0)
        if name.startswith("-"):
            return
        assert name in command.commands, f"hpctrain has no command {name}: {words}"
        command = command.commands[name]
        command = command.loaded() if isinstance(command, Command) else command
        if not rest and isinstance(command, Group):
            return
    if command.name == "launch":
        inner = next((n for n, word in enumerate(rest) if word == "hpctrain"), None)
        if inner is not None:
            parsed(rest[inner:])
    with contextlib.suppress(Exit):
        context = command.make_context(command.name, rest)
    assert context is None or context.command is command


@pytest.mark.parametrize("document", MANUAL)
def test_commands_parse_and_their_files_exist_or_are_made_before(document):
    text = text_of(document)
    made = {*re.findall(r"^# (\w+\.(?:py|toml))", text, re.MULTILINE)} | OF_READERS
    has_examples = False
    for words in commands_of(document):
        line = " ".join(words)
        parsed(words)
        has_examples |= words[:2] == ["hpctrain", "examples"]
        for word in words:
            if word.startswith("examples/"):
                assert has_examples, f"no `hpctrain examples` before: {line}"
                assert (ROOT / word).exists(), line
            elif word.startswith("perf/"):
                assert "In a clone of the repository" in text, line
                assert (ROOT / word).exists(), line
            elif re.fullmatch(r"[\w./-]+\.(py|toml)", word) and word not in made:
                is_made = "init" in line or word in re.findall(r"--out (\S+)", line)
                assert is_made, f"{word} is nowhere made: {line}"
                made.add(word)
