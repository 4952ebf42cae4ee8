"""``hpctrain guide``: the manual, by topic."""

from importlib import resources

import typer
from rich.console import Console
from rich.markdown import Markdown

from hpctrain.cli.options import aligned, argument
from hpctrain.core import target
from hpctrain.core.errors import ConfigError

MAX_WIDTH = 100  # columns of a page on a wide terminal

app = typer.Typer()


@app.command()
def guide(
    topic: str | None = argument("TOPIC", "Page to show.", default=None, shown="list the topics"),
) -> None:
    """Show a page of the manual, or list its topics.

    Where the output is not a terminal, it is the Markdown text.

    Examples:
      hpctrain guide

      hpctrain guide data

      hpctrain guide data | less
    """
    guides = texts()
    if topic is None:
        titles = {name: text.splitlines()[0].lstrip("# ") for name, text in guides.items()}
        rows = [(f"hpctrain guide {name}", title) for name, title in titles.items()]
        typer.echo("\n".join(aligned(rows)))
        return
    if topic not in guides:
        raise ConfigError(f'there is no guide "{topic}"{target.hint(topic, guides)}')
    console = Console()
    if not console.is_terminal:
        typer.echo(guides[topic], nl=False)
        return
    # The 16 colours that the terminal defines: they fit its background.
    page = Markdown(guides[topic], code_theme="ansi_dark", hyperlinks=False)
    console.print(page, width=min(console.width, MAX_WIDTH))


def texts() -> dict[str, str]:
    """Return the text of each page by its topic."""
    files = resources.files("hpctrain.guide").iterdir()
    return {
        file.name.removesuffix(".md"): file.read_text(encoding="utf-8")
        for file in sorted(files, key=lambda file: file.name)
        if file.name.endswith(".md")
    }
