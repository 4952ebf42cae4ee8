"""``hpctrain guide``: the manual, by topic."""

from importlib import resources
from typing import Annotated

import typer

from hpctrain.cli.options import argument
from hpctrain.core.errors import ConfigError
from hpctrain.core.target import hint

MAX_WIDTH = 100  # columns of a guide on a wide terminal


def guide(
    topic: Annotated[
        str | None, argument("TOPIC", "What to read about.", default="list the topics")
    ] = None,
) -> None:
    """Show a part of the manual, or list its topics.

    A pipe or a file gets the Markdown text as it is.

    For instance:

      hpctrain guide

      hpctrain guide data

      hpctrain guide data | less
    """
    guides = _guides()
    if topic is None:
        width = max(map(len, guides))
        for name, text in guides.items():
            typer.echo(f"hpctrain guide {name:<{width}}   {text.splitlines()[0].lstrip('# ')}")
        return
    if topic not in guides:
        raise ConfigError(f'there is no guide "{topic}"{hint(topic, guides)}')
    _show(guides[topic])


def _guides() -> dict[str, str]:
    """The text of each guide by its topic."""
    files = resources.files("hpctrain.guide").iterdir()
    return {
        file.name.removesuffix(".md"): file.read_text(encoding="utf-8")
        for file in sorted(files, key=lambda file: file.name)
        if file.name.endswith(".md")
    }


def _show(text: str) -> None:
    from rich.console import Console  # noqa: PLC0415 - loaded where a guide is read
    from rich.markdown import Markdown  # noqa: PLC0415

    console = Console()
    if not console.is_terminal:
        typer.echo(text, nl=False)
        return
    # The 16 colours of the terminal itself, which fit its background.
    document = Markdown(text, code_theme="ansi_dark", hyperlinks=False)
    console.print(document, width=min(console.width, MAX_WIDTH))
