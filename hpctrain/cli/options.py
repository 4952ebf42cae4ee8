"""Functions for arguments, options and output of several commands."""

import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hpctrain.core.errors import ConfigError

FAILED = 1  # exit code of a command that found a fault; a wrong command line has 2


def argument(
    metavar: str, text: str = "", *, default: Any = ..., shown: str | bool = False
) -> Any:
    """Describe a positional argument for typer; the help shows ``shown`` as its default."""
    return typer.Argument(default, metavar=metavar, help=text, show_default=shown)


def option(
    default: Any, metavar: str, text: str, *names: str, shown: str = "", **settings: Any
) -> Any:
    """Describe an option for typer; the help shows ``shown``, or else the default value.

    Without ``names``, the option is named after its parameter.
    """
    shows = shown or ("none" if default is None else True)
    settings |= {"metavar": metavar, "help": text, "show_default": shows}
    return typer.Option(default, *names, **settings)


def flag(text: str, *names: str, default: Any = False, **settings: Any) -> Any:
    """Describe an option without a value for typer."""
    return typer.Option(default, *names, help=text, **settings)


def takes(
    options: type, *others: inspect.Parameter
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator for a command that takes an instance of the dataclass ``options``.

    The fields of ``options`` become options on the command line. The options in ``others`` are
    added; the command receives these as keyword arguments.
    """
    signature = inspect.signature(options)
    own = signature.parameters

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        def filled(**values: Any) -> None:
            rest = {name: value for name, value in values.items() if name not in own}
            command(options(**{name: values[name] for name in own}), **rest)

        filled.__name__, filled.__doc__ = command.__name__, command.__doc__
        # typer reads only the signature.
        filled.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*own.values(), *others], return_annotation=None
        )
        return filled

    return decorate


def show_json(value: Any) -> None:
    """Print a value as JSON."""
    typer.echo(json.dumps(value, indent=1))


def aligned(rows: Iterable[Sequence[str]], *, indent: str = "") -> Iterator[str]:
    """Yield the lines of a text table with aligned columns."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        texts = [f"{text:{width}}" for text, width in zip(row, widths, strict=True)]
        yield f"{indent}{'  '.join(texts)}".rstrip()


def require_name(path: Path | None, remedy: str) -> Path:
    """Return ``path``, or raise ``ConfigError`` with the message ``remedy`` if it is None."""
    if path is None:
        raise ConfigError(remedy)
    return path


AsJson = Annotated[bool, flag("Print JSON.", "--json", default=...)]
RunFolder = Annotated[Path, argument("RUN", "Directory of the run.")]
Overrides = Annotated[
    list[str] | None,
    option(..., "KEY=VALUE", "Replace a value of the configuration; may be repeated.", "--set"),
]
Partition = Annotated[
    str | None,
    option(
        ..., "NAME", "Slurm partition.", "--partition", "-p", shown="Slurm's default partition"
    ),
]
SiteName = Annotated[
    str | None,
    option(
        ...,
        "NAME",
        "Name of a site profile, or a TOML file with one; none uses no profile.",
        "--site",
        shown="slurm/site.toml, or of this machine",
    ),
]
Account = Annotated[
    str | None,
    option(
        ..., "NAME", "Slurm account to charge.", "--account", "-A", shown="your default account"
    ),
]
TimeLimit = Annotated[
    str | None,
    option(
        ...,
        "TIME",
        "Time limit of a job, such as 01:30:00 or 90min.",
        "--time",
        "-t",
        shown="the partition's limit",
    ),
]
Extra = Annotated[
    list[str] | None,
    option(..., "--qos=high", "Another option of sbatch; may be repeated.", "--option"),
]
