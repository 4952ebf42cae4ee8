"""Arguments and options of commands: what a value is called, and what it means."""

from pathlib import Path
from typing import Annotated, Any

import typer


def argument(metavar: str, text: str = "", *, default: str | bool = False) -> Any:
    """Describe a word of a command line; ``default`` is what the help shows of it."""
    return typer.Argument(metavar=metavar, help=text, show_default=default)


def option(
    metavar: str, text: str, *names: str, default: str | bool = True, **settings: Any
) -> Any:
    """Describe an option with a value; ``default`` is what the help shows of it.

    Without ``names`` it has that of its parameter.
    """
    return typer.Option(*names, metavar=metavar, help=text, show_default=default, **settings)


def flag(text: str, *names: str) -> Any:
    """Describe an option without a value."""
    return typer.Option(*names, help=text)


AsJson = Annotated[bool, flag("Print JSON.", "--json")]
RunFolder = Annotated[Path, argument("RUN", "The run's folder.")]
