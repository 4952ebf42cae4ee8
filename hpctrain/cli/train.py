"""``hpctrain train``: a run from a TOML file."""

from pathlib import Path
from typing import Annotated

import typer

from hpctrain.errors import ConfigError


def train(  # noqa: PLR0913 - a command's options
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
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in its directory.")
    ] = False,
    force: Annotated[
        bool,
        typer.Option("--force", help="With --resume: also if the configuration has changed."),
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

    A signal (SIGTERM, SIGUSR1, Ctrl-C), the end of its time or a file STOP in its directory stops
    the run between two steps: its state is saved, and it ends with code 85. A second signal ends
    it at once.

    Values come from --set, then HPCTRAIN_* variables, then the file, then the defaults.

    For instance:

      hpctrain train examples/digits.toml

      hpctrain train examples/digits.toml --set train.epochs=5 --set model.args.width=32

      hpctrain train examples/digits.toml --resume

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
    from hpctrain.train.run import How, run  # noqa: PLC0415

    code = run(loaded, environment, How(dry_run=dry_run, resume=resume, force=force))
    if code:
        raise typer.Exit(code)


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
