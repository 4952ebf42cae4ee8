"""Arguments and options of commands: what a value is called, and what it means."""

import inspect
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


def unwrap_help(app: typer.Typer) -> None:
    """Join the lines of each paragraph of the help of all commands: typer keeps line breaks.

    What is indented, such as examples, stays as it is.
    """
    for command in app.registered_commands:
        text = inspect.getdoc(command.callback) or ""
        paragraphs = [
            each if "\n " in f"\n{each}" else each.replace("\n", " ")
            for each in text.split("\n\n")
        ]
        if command.callback is not None:
            command.callback.__doc__ = "\n\n".join(paragraphs)
    for group in app.registered_groups:
        if group.typer_instance is not None:
            unwrap_help(group.typer_instance)


AsJson = Annotated[bool, flag("Print JSON.", "--json")]
RunFolder = Annotated[Path, argument("RUN", "The run's folder.")]
