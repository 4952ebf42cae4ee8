"""``hpctrain guide``: show a topic of the manual."""

import importlib
import inspect
from collections.abc import Callable, Iterator
from importlib import resources
from typing import Any

import typer
from rich.console import Console
from rich.markdown import Markdown

from hpctrain.cli.options import argument
from hpctrain.core import keys, target
from hpctrain.core.errors import ConfigError
from hpctrain.guide.contents import KINDS
from hpctrain.launch import site
from hpctrain.train import run_config

MAX_WIDTH = 100  # columns of a page on a wide terminal
MAX_PAGES = 5  # number of pages in a message about a word that is no topic

PACKAGES = (
    *("hpctrain", "hpctrain.data", "hpctrain.checkpoint", "hpctrain.comm", "hpctrain.compress"),
    *("hpctrain.optim", "hpctrain.parallel", "hpctrain.cost", "hpctrain.elastic"),
)
"""Packages whose names are public."""

GENERATED = {
    "api": "Public names: functions and classes with their documentation",
    "commands": "Commands and their options",
    "keys": "Configuration keys and their defaults",
}
"""Titles of the pages that are generated from the code."""

app = typer.Typer()


@app.command()
def guide(
    context: typer.Context,
    topic: str | None = argument("TOPIC", "Page to show.", default=None, shown="list the topics"),
) -> None:
    """Show a page of the manual, or list its topics.

    If the output is not a terminal, the command prints the Markdown text.

    Examples:
      hpctrain guide

      hpctrain guide data

      hpctrain guide data | less
    """
    found = pages(context.find_root().command)
    if topic is None:
        typer.echo("\n".join(_contents(found)))
        return
    if topic not in found:
        raise ConfigError(
            f'a topic must be one of the listed guides, got "{topic}"{_hint(topic, found)}'
        )
    show(found[topic]())


def _hint(word: str, found: dict[str, Callable[[], str]]) -> str:
    """Return a hint for an error message: pages that contain ``word``, or else a similar topic."""
    counts = {name: found[name]().lower().count(word.lower()) for name in {*found} - {*GENERATED}}
    best = sorted(filter(counts.__getitem__, counts), key=lambda name: (-counts[name], name))
    if not best:
        return target.hint(word, found)
    return f'; "{word}" is on the pages {", ".join(best[:MAX_PAGES])}'


def pages(root: Any) -> dict[str, Callable[[], str]]:
    """Return, for each topic, a function that returns the text of the topic.

    ``root`` is the command ``hpctrain``.
    """
    files = {
        file.name.removesuffix(".md"): file
        for file in resources.files("hpctrain.guide").iterdir()
        if file.name.endswith(".md")
    }
    written = {name: lambda file=file: file.read_text("utf-8") for name, file in files.items()}
    return {**written, "api": _api, "commands": lambda: _commands(root), "keys": _keys}


def _contents(found: dict[str, Callable[[], str]]) -> Iterator[str]:
    """Yield a line for each category of guides, followed by a line for each topic."""
    width = max(map(len, found))
    for kind, topics in KINDS.items():
        yield f"{kind}:"
        for name in topics:
            title = GENERATED.get(name) or found[name]().partition("\n")[0].lstrip("# ")
            yield f"  hpctrain guide {name:<{width}}   {title}"


def _api() -> str:
    """Return the page ``api``: all public names, with their docstrings."""
    lines = [f"# {GENERATED['api']}"]
    for package in PACKAGES:
        module = importlib.import_module(package)
        lines += ["", f"## {package}", "", (inspect.getdoc(module) or "").partition("\n")[0]]
        for name in sorted({*module.__all__} - {"__version__"}):
            lines += ["", f"### {package}.{name}", "", "```text", *_about(name, module), "```"]
    return "\n".join([*lines, ""])


def _about(name: str, module: Any) -> list[str]:
    """Return the signature and docstring of a public name, as lines."""
    value = getattr(module, name)
    if not callable(value):
        return [f"{name} = {value!r}"]
    try:
        signature = str(inspect.signature(value))
    except (TypeError, ValueError):  # the class has a constructor without a readable signature
        signature = ""
    return [f"{name}{signature}", "", *(inspect.getdoc(value) or "").splitlines()]


def _keys() -> str:
    """Return the page ``keys``: all configuration keys, with descriptions and defaults."""
    return (
        f"# {GENERATED['keys']}\n\n"
        "`hpctrain train FILE --init` writes this text to a file; `hpctrain train FILE --explain "
        "KEY` shows one key, its value in FILE and where the value was set. `--set KEY=VALUE` "
        "changes a key for one run. Keys that a file omits have the defaults below.\n\n"
        f"```toml\n{keys.render(run_config.RunConfig())}```\n\n"
        "## Keys of slurm/site.toml\n\n`hpctrain site init` writes this profile of a machine; "
        "`hpctrain site show lumi` shows an example.\n\n"
        f"```toml\n{keys.render(site.SiteProfile())}```\n"
    )


def _commands(root: Any) -> str:
    """Return the page ``commands``: a section for each command, with its options."""
    lines = [f"# {GENERATED['commands']}", ""]
    lines += ["`hpctrain COMMAND --help` shows one command with examples.", ""]
    for name, command in root.commands.items():
        lines += _command(f"hpctrain {name}", command.loaded())
    return "\n".join(lines)


def _command(name: str, command: Any) -> Iterator[str]:
    """Yield the section of a command, followed by the sections of its subcommands."""
    summary = (command.help or "").partition("\n\n")[0].replace("\n", " ")
    yield from (f"## {name}", "", summary, "")
    rows = [row for row in map(_row, command.params) if row]
    if rows:
        yield from ("| argument or option | meaning |", "|---|---|", *rows, "")
    for inner, each in getattr(command, "commands", {}).items():
        yield from _command(f"{name} {inner}", each)


def _row(parameter: Any) -> str:
    text = " ".join((getattr(parameter, "help", "") or "").split()).replace("|", "\\|")
    if getattr(parameter, "hidden", False) or not text:
        return ""
    is_option = parameter.param_type_name == "option"
    names = ", ".join(parameter.opts) if is_option else ""
    value = parameter.metavar or ""
    shown = " ".join(filter(None, (names, value))).replace("|", "\\|")
    return f"| `{shown}` | {text} |"


def show(text: str) -> None:
    """Print Markdown; format it only if the output is a terminal."""
    console = Console()
    if not console.is_terminal:
        typer.echo(text, nl=False)
        return
    # Use the 16 standard colours, which are readable on the background of any terminal.
    document = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
    console.print(document, width=min(console.width, MAX_WIDTH))
