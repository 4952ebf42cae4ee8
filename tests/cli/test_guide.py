"""Check ``hpctrain guide``: every snippet and every command of a guide runs."""

import ast
import contextlib
import importlib
import inspect
import os
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

import hpctrain
from hpctrain.cli import guide as guides
from hpctrain.cli.launch import INTERRUPTED
from hpctrain.cli.main import COMMANDS, USAGE_ERROR, Command, app
from hpctrain.cluster.env import RANK_LOST
from hpctrain.compress import by_name
from hpctrain.core import errors
from hpctrain.core.errors import ConfigError
from hpctrain.core.keys import render
from hpctrain.core.python_compat import tomllib
from hpctrain.guide.contents import KINDS
from hpctrain.launch.site import SiteProfile
from hpctrain.launch.supervise import TIMED_OUT
from hpctrain.negotiation.stall import HANG
from hpctrain.runtime import abort
from hpctrain.runtime.stopping import STOPPED
from hpctrain.train.run_config import RunConfig
from tests.harness import preload
from tests.processes import ended

ROOT = get_command(app)
PAGES = guides.pages(ROOT)
TEXTS = {name: text_of() for name, text_of in PAGES.items()}
WRITTEN = [name for name in PAGES if name not in guides.GENERATED]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LAUNCH = re.compile(r"^hpctrain launch (.*?)-- ")


def loaded(name):
    return Command(name).loaded()


def lines_of(code):
    """Yield the commands of a shell block, without the launcher."""
    for line in filter(None, code.replace("\\\n", " ").splitlines()):
        if found := LAUNCH.match(line):
            yield f"hpctrain launch --dry-run {found[1]}-- true"
        yield LAUNCH.sub("", line)


def run(line):
    program, *words = shlex.split(line, comments=True)
    if [program, words[0]] == ["cp", "-r"]:
        return str(shutil.copytree(*words[1:]))
    assert program == "hpctrain", line
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, f"{line}: {result.output} {result.exception!r}"
    return result.output


def test_without_a_topic_every_guide_is_listed_once_with_its_title_below_its_kind():
    output = run("hpctrain guide")
    assert re.findall(r"^(\S.*):$", output, re.MULTILINE) == list(KINDS)
    listed = dict(re.findall(r"^  hpctrain guide (\S+) +(.+)$", output, re.MULTILINE))
    assert len(output.splitlines()) == len(KINDS) + len(TEXTS)
    assert listed == {name: text.splitlines()[0].lstrip("# ") for name, text in TEXTS.items()}


def test_the_written_guides_together_are_short():
    texts = {name: TEXTS[name] for name in WRITTEN}
    for name in ("settings", "versions"):  # whose first table is generated
        head, table, rest = texts[name].partition("\n| ")
        texts[name] = head + (table + rest).partition("\n\n")[2]
    assert sum(len(text.split()) for text in texts.values()) <= 30_000


def test_the_generated_api_has_every_public_name_with_its_documentation():
    for package in guides.PACKAGES:
        module = importlib.import_module(package)
        for name in {*module.__all__} - {"__version__"}:
            text = TEXTS["api"].partition(f"### {package}.{name}\n")[2].partition("\n### ")[0]
            doc = inspect.getdoc(getattr(module, name)) or ""
            assert name in text
            assert not callable(getattr(module, name)) or doc.partition("\n")[0] in text


def test_generated_pages_have_every_key_with_its_default_and_every_option():
    block, of_site = (code for _, code in BLOCK.findall(TEXTS["keys"]))
    assert tomllib.loads(of_site) == tomllib.loads(render(SiteProfile()))
    assert tomllib.loads(block) == tomllib.loads(render(RunConfig()))
    sections = re.findall(
        r"^## hpctrain (.+)\n((?:(?!## ).*\n)*)", TEXTS["commands"], re.MULTILINE
    )
    assert {name for name, _ in sections} >= set(ROOT.commands) | {"data pack", "study run"}
    options = [
        each for each in ROOT.commands["train"].loaded().params if not getattr(each, "hidden", 0)
    ]
    names = [
        each.opts[0]
        for each in options
        if each.name != "help" and each.param_type_name == "option"
    ]
    assert len(names) > 5
    assert [name for name in names if f"`{name}" not in dict(sections)["train"]] == []


def test_a_pipe_gets_the_unchanged_text():
    assert run("hpctrain guide data") == TEXTS["data"]


def test_a_terminal_gets_formatted_text(monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "300")
    guides.show(TEXTS["data"])
    shown = capsys.readouterr().out
    assert "```" not in shown
    assert "\x1b[" in shown
    plain = re.sub(r"\x1b\[[\d;]*m", "", shown)
    assert max(map(len, plain.splitlines())) <= guides.MAX_WIDTH
    assert "hpctrain data verify data/toy" in plain


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("dta", "did you mean data?"),
        ("Adasum", '"Adasum" is on the pages '),
        ("qx", "valid names"),
    ],
)
def test_unknown_topic_raises_with_a_remedy(word, text):
    with pytest.raises(
        ConfigError,
        match=re.escape(f'a topic must be one of the listed guides, got "{word}"; {text}'),
    ):
        CliRunner().invoke(app, ["guide", word], catch_exceptions=False)


@pytest.mark.parametrize("topic", TEXTS)
def test_commands_within_sentences_exist(topic):
    prose = BLOCK.sub("", TEXTS[topic])
    data = loaded("data").commands
    for command, words in re.findall(r"`hpctrain data (\w+)([^`]*)`", prose):
        options = {option for each in data[command].params for option in each.opts}
        assert set(re.findall(r"--[\w-]+", words)) <= options | {"--help"}, (command, words)
    found = [loaded(name) for name in COMMANDS]
    found += [inner for each in found for inner in getattr(each, "commands", {}).values()]
    every = {option for each in found for one in each.params for option in one.opts}
    assert set(re.findall(r"`(--[\w-]+)", prose)) <= every


@pytest.mark.parametrize("topic", TEXTS)
def test_every_snippet_runs_from_top_to_bottom(topic, tmp_path, monkeypatch):
    """In one process: a snippet may use results of earlier ones."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    names: dict[str, object] = {"__name__": "guide"}
    try:
        for language, code in BLOCK.findall(TEXTS[topic]):
            if language == "python" and (name := re.match(r"# (\w+)\.py\n", code)):
                Path(f"{name[1]}.py").write_text(code)
                monkeypatch.delitem(sys.modules, name[1], raising=False)
            elif language == "python":
                exec(compile(code, f"guide {topic}", "exec"), names)
            elif language == "toml" and (name := re.search(r"# (\w+\.toml)\n", code)):
                Path(name[1]).write_text(code)
            elif language == "sh":
                for line in lines_of(code):
                    run(line)
    finally:
        hpctrain.shutdown()


@pytest.mark.launches
@pytest.mark.limit(180)
def test_script_of_start_stops_on_request_and_resumes(tmp_path):
    (script,) = (code for language, code in BLOCK.findall(TEXTS["start"]) if language == "py")
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "STOP").touch()

    def run():
        environ = os.environ | {"RUN_DIRECTORY": str(tmp_path), "HPCTRAIN_ALONE": "1"}
        line = [*preload.python(), "train.py", "300"]
        return ended(line, env=environ, cwd=tmp_path)

    assert run().returncode == 85
    (tmp_path / "STOP").unlink()
    done = run()
    assert done.returncode == 0, done.stderr
    pattern = r"begin at step 1\nstep 200: \S+ right\nfinished after 300 steps"
    assert re.search(pattern, done.stdout), done.stdout


@pytest.mark.parametrize("topic", WRITTEN)
def test_lines_of_code_are_short_enough_for_a_terminal(topic):
    for _, code in BLOCK.findall(TEXTS[topic]):
        assert max(map(len, code.splitlines())) <= guides.MAX_WIDTH - 4


@pytest.mark.parametrize("topic", TEXTS)
def test_files_of_the_project_that_a_guide_names_exist(topic):
    root = Path(__file__).parents[2]
    for name in re.findall(r"`((?:examples|perf)/[\w./]+)`", TEXTS[topic]):
        assert (root / name).exists() or name == "perf/results", name


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("topic", ["ddp", "migrate", "recover", "checkpoints", "embeddings"])
def test_snippets_for_scripts_of_ones_own_run_on_several_ranks(topic, world, tmp_path):
    """Rank 0 runs the shell commands between them."""
    names: dict[str, object] = {"__name__": "guide"}
    with contextlib.ExitStack() as stack:
        stack.callback(hpctrain.shutdown)
        stack.enter_context(contextlib.chdir(world.bcast(tmp_path)))
        for language, code in BLOCK.findall(TEXTS[topic]):
            if language == "python":
                exec(compile(code, f"guide {topic}", "exec"), names)
            elif language == "sh" and world.rank == 0:
                for line in lines_of(code):
                    run(line)
            world.barrier()


# Errors


def test_every_exit_code_and_every_class_of_errors_is_in_the_guide():
    codes = {abort.FAILED, RANK_LOST, STOPPED, HANG, TIMED_OUT, INTERRUPTED, USAGE_ERROR}
    rows = re.findall(r"^\| ([\d, ]+) \|", TEXTS["errors"], re.MULTILINE)
    assert codes <= {int(number) for row in rows for number in row.split(",")}
    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    assert set(re.findall(r"^\| `(\w+Error)` \|", TEXTS["errors"], re.MULTILINE)) | {
        "HpctrainError"
    } == {name for name in classes if issubclass(getattr(errors, name), errors.HpctrainError)}


def messages() -> str:
    """Return every text in the code, with "..." for inserted values, one per line."""
    texts = []
    for file in Path(guides.__file__).parents[1].rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [getattr(each, "value", "") for each in node.values]
                texts.append("".join(p if isinstance(p, str) else "..." for p in parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return "\n".join(text.replace("\n", " ") for text in texts)


def test_messages_that_the_guide_of_errors_quotes_are_those_of_the_code():
    every = messages()
    table = TEXTS["errors"].partition("## Starting")[2]
    quoted = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
    assert len(quoted) >= 30
    patterns = {each: ".*".join(map(re.escape, each.split("..."))) for each in quoted}
    assert [each for each, pattern in patterns.items() if not re.search(pattern, every)] == []


def test_the_guide_of_compression_has_every_codec():
    table = re.search(r"^\| name \|.*?(?=\n\n)", TEXTS["compression"], re.MULTILINE | re.DOTALL)
    names = "".join(re.findall(r"^\| ([^|]+) \|", table[0], re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", names)) == {*by_name.CODECS} - {"none"}


def test_guides_name_only_guides_that_exist():
    for name in WRITTEN:
        named = re.findall(r"`hpctrain\s+guide\s+([a-z-]+)`", TEXTS[name])
        assert set(named) <= set(TEXTS), name
