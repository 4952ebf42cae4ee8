"""``hpctrain env``: the environment, for people and for another machine."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from hpctrain.core.errors import ConfigError

Row = tuple[str, str]


def env(
    *,
    lock: Annotated[
        bool, typer.Option("--lock", help="Write exact versions, as `pip install -r` reads them.")
    ] = False,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="Where --lock writes to.", show_default="stdout"),
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="With --lock: an extra of hpctrain that goes along; may be repeated.",
            show_default="all that are installed",
        ),
    ] = None,
) -> None:
    """Show what hpctrain runs with: Python, packages, MPI, launcher, settings.

    With --lock, write it down for another machine: this environment's version of each package
    that hpctrain needs.

    For instance:

      hpctrain env

      hpctrain env --lock hpctrain.lock

      pip wheel -r hpctrain.lock -w wheels
    """
    if not lock and (file is not None or extra):
        raise ConfigError("a file and --extra belong to --lock: hpctrain env --lock FILE")
    if not lock:
        _show()
        return
    from hpctrain.launch.lock import lock as text_of  # noqa: PLC0415

    text = text_of(frozenset(extra) if extra else None)
    if file is None:
        typer.echo(text, nl=False)
    else:
        file.write_text(text, encoding="utf-8")


def _show() -> None:
    rows = [*_place(), *_mpi(), *_launch(), *_packages()]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        typer.echo(f"{name:<{width}}  {text}")


def _place() -> Iterator[Row]:
    from hpctrain.launch.lock import machine  # noqa: PLC0415

    yield "machine", machine()
    yield "environment", sys.prefix


def _mpi() -> Iterator[Row]:
    from hpctrain.core.errors import LaunchError  # noqa: PLC0415
    from hpctrain.launch import lock, pmi  # noqa: PLC0415
    from hpctrain.launch.mpirun import find_mpirun  # noqa: PLC0415

    yield "MPI library", lock.mpi()
    try:
        yield "srun", f"--mpi={pmi.needed_pmi()}"
        found = find_mpirun()
        yield "mpirun", f"{found.path}, {found.flavour} {found.version}"
    except LaunchError as error:
        yield "MPI", str(error)


def _launch() -> Iterator[Row]:
    """What the launcher and the user say by variables."""
    from hpctrain.cluster.env import job_id, launched, scheduler, tuning  # noqa: PLC0415

    found = launched()
    interface = f" --mpi={found.pmi}" if found and found.pmi else ""
    yield "launcher", f"{found.name}{interface}" if found else "none"
    name = scheduler()
    yield "scheduler", f"{name}, job {job_id()}" if name else "none"
    ours = {key: text for key, text in os.environ.items() if key.startswith("HPCTRAIN_")}
    yield from sorted((ours | tuning()).items())


def _packages() -> Iterator[Row]:
    from hpctrain.launch.lock import direct  # noqa: PLC0415

    for package in direct():
        origin = f" from {package.url}" if package.url else ""
        yield package.name, f"{package.version}{origin}"
