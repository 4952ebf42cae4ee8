"""``hpctrain train``: a run from a TOML file."""

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.errors import ConfigError


def train(
    config: Annotated[
        Path | None, typer.Argument(metavar="CONFIG.toml", help="What to train.")
    ] = None,
    *,
    overrides: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="KEY=VALUE", help="Replace a value of the file; may be repeated."
        ),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Build and describe everything, train nothing.")
    ] = False,
    init: Annotated[
        bool, typer.Option("--init", help="Write CONFIG.toml, with every key, and stop.")
    ] = False,
    key: Annotated[
        str | None,
        typer.Option(
            "--explain",
            metavar="KEY",
            help="Tell what a key or a table means, its value and who set it, and stop.",
        ),
    ] = None,
) -> None:
    """Train what a TOML file describes, on all ranks that were started together.

    Values come from --set, then HPCTRAIN_* variables, then the file, then the defaults.

    For instance:

      hpctrain train examples/digits.toml

      hpctrain train examples/digits.toml --set train.epochs=5 --set model.args.width=32

      hpctrain train examples/digits.toml --explain train.global_batch

      hpctrain launch -n 4 --nodes 2 hpctrain train examples/digits.toml
    """
    from hpctrain.config import given  # noqa: PLC0415
    from hpctrain.train.load import load  # noqa: PLC0415

    if init:
        _init(config)
        return
    if config is None and key is None:
        raise ConfigError(
            "a run needs a configuration: hpctrain train CONFIG.toml; "
            "hpctrain train my.toml --init writes one with every key"
        )
    environment = given()
    loaded = load(config, overrides or (), environment)
    if key is not None:
        from hpctrain.train.explain import explain  # noqa: PLC0415

        rows = explain(key, loaded)
        width = max(len(name) for name, _ in rows)
        typer.echo("\n".join(f"{name:{width}}  {text}" for name, text in rows))
        return
    from hpctrain.train.run import run  # noqa: PLC0415

    run(loaded, environment, dry_run=dry_run)


def _init(path: Path | None) -> None:
    from hpctrain.train.template import render  # noqa: PLC0415

    if path is None:
        raise ConfigError(
            "--init writes a file, so it needs its name: hpctrain train my.toml --init"
        )
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(render())
    except FileExistsError:
        raise ConfigError(f"{path} exists and is left as it is; choose another name") from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
    typer.echo(
        f"{path} has every key with its default; set model.target and data.target, then: "
        f"hpctrain train {path}"
    )
