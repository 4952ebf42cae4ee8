"""Generator of the sources of the HTML manual: guides, examples, public names.

    python hpctrain/guide/html/pages.py build/docs-source [--output]

The sources have the folders of the repository, so links between documents remain valid. The text
``hpctrain guide TOPIC`` and the names of examples become links. With ``--output``, the program
also runs examples that take only seconds, by the commands in the README of the examples.
"""

import argparse
import importlib
import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from typer.main import get_command

from hpctrain.cli import guide
from hpctrain.cli.main import app
from hpctrain.guide.contents import KINDS

ROOT = Path(__file__).parents[3]
GUIDES = ROOT / "hpctrain/guide"


SECTIONS = {
    "runtime": "The world",
    "gradients": "Training",
    "data": "Training",
    "local_sgd": "Agreeing less often",
    "collectives": "Operations",
    "negotiation": "Reductions",
    "compress": "Compression",
    "checkpoint": "Checkpoints",
    "launch": "Jobs",
    "core": "Records and errors",
}
"""Titles of the sections of the reference, by the subpackage that defines the names."""

CODE = {".py": "python", ".toml": "toml", ".lua": "lua", ".yml": "yaml", ".json": "json"}
CODE |= {".def": "bash", ".ipynb": "json"}

IN_SECONDS = {
    "01_four_lines.py",
    "digits.toml",
    "elastic_digits.py",
    "local_sgd.toml",
    "measured.py",
}
ALONE = "hpctrain launch -n 2 -- python examples/tour/{name}"
LIMIT_S = 600
PROJECT = [
    *("Changes <CHANGELOG>", "Contributing <CONTRIBUTING>", "Tests <tests/README>"),
    *("Figures <perf/README>", "Security <SECURITY>", "Support <SUPPORT>"),
]

GUIDE = re.compile(r"`hpctrain guide\s+([a-z-]+)`")
EXAMPLE = re.compile(r"`(examples/[\w./-]+)`")
LINK = re.compile(r"\]\(([\w./-]+)\)")


class Pages:
    """Writer of all pages of the manual.

    Args:
        folder: folder of the pages, which is replaced.
        with_output: whether short examples are run and their output is added to their pages.
    """

    def __init__(self, folder: Path, *, with_output: bool) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        self._folder = folder
        self._with_output = with_output
        self._guides = guide.pages(get_command(app))
        del self._guides["api"]  # the pages below reference/ describe these names
        self._examples = sorted(
            path.relative_to(ROOT)
            for path in (ROOT / "examples").rglob("*")
            if path.suffix in CODE and not path.name.startswith(".")
        )

    def write(self) -> None:
        """Write all pages of the manual into the folder."""
        for topic, text_of in self._guides.items():
            self._put(Path("guide", f"{topic}.md"), self._converted(text_of(), GUIDES))
        for source in (ROOT / "examples").rglob("*.md"):
            self._document(source, source.relative_to(ROOT), self._examples_of(source.parent))
        for name in (*ROOT.glob("*.md"), ROOT / "tests/README.md", ROOT / "perf/README.md"):
            if name != ROOT / "README.md":
                self._document(name, name.relative_to(ROOT))
        for pattern in ("perf/results/*.png", "LICENSE", "CITATION.cff"):
            for file in ROOT.glob(pattern):
                self._copy(file, file.relative_to(ROOT))
        for example in self._examples:
            self._example(example)
        for package in guide.PACKAGES:
            self._put(Path("reference", f"{package}.md"), "\n".join(reference(package)))
        self._document(ROOT / "README.md", Path("index.md"), "\n".join(self._contents()))

    def _contents(self) -> Iterator[str]:
        """Yield the lines of the tables of contents, which only the sidebar shows."""
        for caption, topics in KINDS.items():
            shown = [f"{topic} <guide/{topic}>" for topic in topics if topic in self._guides]
            yield from _toctree(caption, shown)
        packages = [f"{name} <reference/{name}>" for name in guide.PACKAGES]
        yield from _toctree("Public names", packages)
        yield from _toctree("Examples", ["examples <examples/README>"])
        yield from _toctree("Project", PROJECT)

    def _examples_of(self, folder: Path) -> str:
        """Return the table of contents of an examples folder, and of subfolders without README."""
        with_readme = {path.parent.relative_to(ROOT) for path in ROOT.glob("examples/*/README.md")}
        place = folder.relative_to(ROOT)
        mine = [
            path
            for path in self._examples
            if next((each for each in path.parents if each in with_readme), Path("examples"))
            == place
        ]
        entries = [f"{each} <{each}>" for each in (path.relative_to(place) for path in mine)]
        if place == Path("examples"):
            entries += [f"{each.name}/ <{each.name}/README>" for each in sorted(with_readme)]
        return "\n".join(_toctree("", entries))

    def _document(self, source: Path, place: Path, behind: str = "") -> None:
        text = self._converted(source.read_text(encoding="utf-8"), source.parent)
        self._put(place, f"{text}\n{behind}")

    def _converted(self, text: str, folder: Path) -> str:
        """Return Markdown text with links from the names of guides and examples to the pages."""
        text = "".join(self._linked(part) for part in _parts(text))
        return LINK.sub(lambda found: self._to_page(found, folder), text)

    def _linked(self, part: str) -> str:
        """Return a part of a document, with names of guides and examples replaced by links."""
        if part.startswith(("```", "    ")):
            return part
        topics, examples = self._guides, self._examples

        def to_guide(found: re.Match[str]) -> str:
            known = found[1] in topics
            return f"[`hpctrain guide {found[1]}`](/guide/{found[1]}.md)" if known else found[0]

        def to_example(found: re.Match[str]) -> str:
            known = Path(found[1]) in examples
            return f"[`{found[1]}`](/{found[1]}.md)" if known else found[0]

        bare = re.split(r"(\[[^\]]*\]\([^)]*\))", part)  # existing links are kept
        return "".join(
            each if each.startswith("[") else EXAMPLE.sub(to_example, GUIDE.sub(to_guide, each))
            for each in bare
        )

    def _to_page(self, found: re.Match[str], folder: Path) -> str:
        """Return a link; if it leads to an example or a chart, change its target to the page."""
        target = (folder / found[1]).resolve()
        if target.suffix == ".png" and target.is_relative_to(ROOT):
            return f"](/{target.relative_to(ROOT)})"
        if target.is_relative_to(ROOT) and target.relative_to(ROOT) in self._examples:
            return f"](/{target.relative_to(ROOT)}.md)"
        return found[0]

    def _example(self, example: Path) -> None:
        self._copy(ROOT / example, example)
        name = example.name
        if example.suffix == ".ipynb":
            text = "\n".join(cells_of(ROOT / example, is_run=self._with_output))
            self._put(example.with_name(f"{name}.md"), text)
            return
        lines = [f"# {example.relative_to('examples')}", ""]
        if command := command_of(example):
            lines += ["    " + command, ""]
        lines += [f"```{{literalinclude}} {name}", f":language: {CODE[example.suffix]}", "```"]
        is_short = name in IN_SECONDS or (
            example.suffix == ".py" and example.parent.name in ("tour", "studies")
        )
        if command and is_short and self._with_output:
            output, figure = output_of(command)
            lines += ["", "## Output", "", "```text", output.rstrip(), "```"]
            if figure is not None:
                self._put(example.with_name(f"{name}.png"), figure)
                lines += ["", f"![what {name} has drawn]({name}.png)"]
        self._put(example.with_name(f"{name}.md"), "\n".join(lines) + "\n")

    def _copy(self, source: Path, place: Path) -> None:
        self._put(place, source.read_bytes())

    def _put(self, place: Path, contents: str | bytes) -> None:
        path = self._folder / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents.encode() if isinstance(contents, str) else contents)


def _parts(text: str) -> list[str]:
    """Split a document into fenced blocks, indented lines and other text."""
    return re.split(r"(^```.*?^```$|^    .*$)", text, flags=re.MULTILINE | re.DOTALL)


def _toctree(caption: str, entries: list[str]) -> list[str]:
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return ["", "```{toctree}", *options, "", *entries, "```"]


# --- examples -----------------------------------------------------------------------------------


def command_of(example: Path) -> str:
    """Return the command of an example from the README, or an empty text."""
    if example.parent.name == "tour":
        return ALONE.format(name=example.name) if example.name[0].isdigit() else ""
    if example.parent.name == "studies":
        return f"python {example}" if example.suffix == ".py" else f"hpctrain study run {example}"
    text = (ROOT / "examples/README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if f"]({example.name})" in line]
    commands = [found for row in rows for found in re.findall(rf"`([^`]* {example}[^`]*)`", row)]
    return commands[0] if commands else ""


def output_of(command: str) -> tuple[str, bytes | None]:
    """Run the command of an example in a new folder; return the output and the figure, if any.

    Raises:
        SystemExit: the command failed.
    """
    with tempfile.TemporaryDirectory(prefix="hpctrain-docs-") as name:
        folder = Path(name)
        (folder / "examples").symlink_to(ROOT / "examples")
        here = str(Path(sys.executable).parent)
        environ = {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "COLUMNS": "96"}
        environ |= {"PYTHONPATH": str(ROOT), "NO_COLOR": "1"}
        sys.stderr.write(f"{command}\n")
        done = subprocess.run(  # noqa: S603 - a command of our own documents
            shlex.split(command),
            cwd=folder,
            env=environ,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(
                f"the command of an example must succeed, but {command} "
                f"failed:\n{done.stdout}{done.stderr}"
            )
        figures = sorted(folder.glob("runs/*/plots/*.png"))
        figure = figures[0].read_bytes() if figures else None
        return done.stdout.replace(f"{folder}/", ""), figure


def cells_of(notebook: Path, *, is_run: bool) -> Iterator[str]:
    """Yield the cells of a notebook as Markdown, with their output if ``is_run``."""
    import nbformat  # noqa: PLC0415 - of the extra `docs`
    from nbclient import NotebookClient  # noqa: PLC0415

    found = nbformat.read(notebook, as_version=4)
    if is_run:
        sys.stderr.write(f"{notebook.name}\n")
        NotebookClient(found, timeout=LIMIT_S).execute()
    for cell in found.cells:
        is_code = cell.cell_type == "code"
        yield f"```python\n{cell.source}\n```\n" if is_code else f"{cell.source}\n"
        output = [each.text for each in cell.get("outputs", ()) if each.get("name") == "stdout"]
        if output:
            yield f"```text\n{''.join(output)}```\n"


# --- public names -------------------------------------------------------------------------------


def reference(package: str) -> Iterator[str]:
    """Yield the lines of the reference page of a module, with directives of autodoc."""
    module = importlib.import_module(package)
    yield from (f"# {package}", "", inspect.getdoc(module) or "", "")
    for title, names in _sections(package, module).items():
        if title:
            yield from (f"## {title}", "")
        yield "```{eval-rst}"
        for name in names:
            yield from _entry(f"{package}.{name}", getattr(module, name), package)
        yield "```"


def _sections(package: str, module: ModuleType) -> dict[str, list[str]]:
    names = [name for name in module.__all__ if name not in ("__version__", "elastic")]
    if package != "hpctrain":
        return {"": names}
    places = _places(package)
    names = [name for name in names if name in places]  # without aliases
    where = {name: places[name].split(".")[1] for name in names}
    order = [*SECTIONS, *sorted({*where.values()} - {*SECTIONS})]
    found: dict[str, list[str]] = {}
    for part in order:
        mine = [name for name in names if where[name] == part]
        if mine:
            found.setdefault(SECTIONS.get(part, part), []).extend(mine)
    return found


def _places(package: str) -> dict[str, str]:
    """Return a dict from each public name of a package to its module, read from the stub file."""
    stub = Path(str(importlib.import_module(package).__file__)).with_suffix(".pyi")
    if not stub.exists():
        return {}
    found = re.findall(r"^from (\S+) import \(?\s*(\w+) as", stub.read_text("utf-8"), re.MULTILINE)
    return {name: place for place, name in found}


def _entry(full: str, value: Any, package: str) -> list[str]:
    name = full.rpartition(".")[2]
    if inspect.isclass(value):
        kind = "exception" if issubclass(value, BaseException) else "class"
        return [f".. auto{kind}:: {full}", ""]
    if callable(value):
        return [f".. autofunction:: {full}", ""]
    text = _comment(name, _places(package).get(name, package))
    if not text:
        raise SystemExit(
            f"{full} must have a docstring or a comment at its assignment, but has none"
        )
    return [f".. py:data:: {full}", "", *(f"   {line}" for line in text), ""]


def _comment(name: str, module: str) -> list[str]:
    """Return the docstring below the assignment of a name, or the comment in the same line."""
    from sphinx.pycode import ModuleAnalyzer  # noqa: PLC0415 - its tests need no Sphinx

    analyzer = ModuleAnalyzer.for_module(module)
    found = re.search(rf"^{name} = .*?  # (.+)$", analyzer.code, re.MULTILINE)
    below: list[str] = list(analyzer.find_attr_docs().get(("", name), []))
    return below or ([found[1]] if found else [])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="folder of the sources, which is replaced")
    parser.add_argument("--output", action="store_true", help="run the examples, show the output")
    arguments = parser.parse_args()
    Pages(arguments.folder, with_output=arguments.output).write()
