"""``hpctrain train``: a run from a TOML file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.cli.options import argument, flag, option
from hpctrain.core.atomic import refusal
from hpctrain.core.errors import ConfigError


def train(  # noqa: PLR0913 - a command's options
    config: Annotated[Path | None, argument("CONFIG.toml", "What to train.")] = None,
    *,
    overrides: Annotated[
        list[str] | None,
        option("KEY=VALUE", "Replace a value of the file; may be repeated.", "--set"),
    ] = None,
    dry_run: Annotated[
        bool,
        flag(
            "Build and describe everything, try a step and a test of one batch, keep none.",
            "--dry-run",
        ),
    ] = False,
    look: Annotated[bool, typer.Option("--look", hidden=True)] = False,
    resume: Annotated[bool, flag("Go on with the run in its directory.", "--resume")] = False,
    changed: Annotated[
        bool,
        flag("With --resume: go on with another configuration, such as more epochs.", "--changed"),
    ] = False,
    force: Annotated[
        bool,
        flag(
            "With --resume: take the run from a job that is at work in its directory, which "
            "loses what it has learnt since its last checkpoint.",
            "--force",
        ),
    ] = False,
    verbose: Annotated[
        bool, flag("Tell all of configuration, topology and plan.", "--verbose", "-v")
    ] = False,
    init: Annotated[bool, flag("Write CONFIG.toml, with every key, and stop.", "--init")] = False,
    key: Annotated[
        str | None,
        option(
            "KEY",
            "Tell what a key or a table means, its value and who set it, and stop.",
            "--explain",
        ),
    ] = None,
) -> None:
    """Train what a TOML file describes, on all ranks that were started together.

    A signal (SIGTERM, SIGUSR1, Ctrl-C), the end of its time or a file STOP in its directory stops
    the run between two steps: its state is saved, and it ends with code 85. A second signal ends
    it at once.

    One job at a time writes into a directory. A second one waits a minute for the first, so that a
    job that is queued again goes on also after a kill; then it ends, and names the first.

    Values come from --set, then HPCTRAIN_* variables, then the file, then the defaults.

    For instance:

      hpctrain train examples/digits.toml

      hpctrain train examples/digits.toml --set train.epochs=5 --set model.args.width=32

      hpctrain train examples/digits.toml --resume

      hpctrain train examples/digits.toml --resume --changed --set train.epochs=40

      hpctrain train examples/digits.toml --explain train.global_batch

      hpctrain launch -n 4 --nodes 2 hpctrain train examples/digits.toml
    """
    if init:
        _init(config)
    elif key is not None:
        _explain(key, config, overrides or ())
    elif config is None:
        raise ConfigError(
            "a run needs a configuration: hpctrain train CONFIG.toml; "
            "hpctrain train my.toml --init writes one with every key"
        )
    else:
        how = {
            "dry_run": dry_run or look,
            "look": look,
            "resume": resume,
            "changed": changed,
            "force": force,
            "verbose": verbose,
        }
        code = _run(config, overrides or (), **how)
        if code:
            raise typer.Exit(code)


def _run(config: Path, overrides: Sequence[str], **how: bool) -> int:
    from hpctrain.comm.mpi_world import doubt  # noqa: PLC0415
    from hpctrain.runtime.stopping import held_back  # noqa: PLC0415

    # torch takes seconds to load: a launch that cannot work ends before, and a request to stop
    # that comes meanwhile is not lost.
    with held_back():
        doubt()
        from hpctrain.core.config import given  # noqa: PLC0415
        from hpctrain.train.load_config import load  # noqa: PLC0415
        from hpctrain.train.run import RunOptions, run  # noqa: PLC0415

        environment = given()
        return run(load(config, overrides, environment), environment, RunOptions(**how))


def _explain(key: str, config: Path | None, overrides: Sequence[str]) -> None:
    from hpctrain.core.config import given  # noqa: PLC0415
    from hpctrain.train.load_config import load  # noqa: PLC0415

    rows = load(config, overrides, given()).explain(key)
    width = max(len(name) for name, _ in rows)
    typer.echo("\n".join(f"{name:{width}}  {text}" for name, text in rows))


def _init(path: Path | None) -> None:
    from hpctrain.core.keys import render  # noqa: PLC0415
    from hpctrain.train import toy_problem  # noqa: PLC0415

    if path is None:
        raise ConfigError(
            "--init writes a file, so it needs its name: hpctrain train my.toml --init"
        )
    write_new(path, render(toy_problem.config()))
    typer.echo(
        f"{path} has every key; as it is, it trains a small made-up problem: "
        f"hpctrain train {path}; then put your own model.target and data.target in"
    )


def write_new(path: Path, text: str) -> None:
    """Write a file that is not there yet. Raises ``ConfigError``: it is, or it cannot be."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ConfigError(f"{path} exists and is left as it is; choose another name") from None
    except OSError as error:
        told = refusal(error, "name another file")
        raise ConfigError(f"{path} cannot be written: {told}") from None
