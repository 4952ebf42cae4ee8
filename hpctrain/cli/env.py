"""``hpctrain env``: the environment, for people and reports."""

import json
import os
import platform
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import typer

Row = tuple[str, str]


def env() -> None:
    """Show what hpctrain runs with: Python, packages, MPI, launcher, settings."""
    rows = [*_place(), *_mpi(), *_launch(), *_packages()]
    width = max(len(name) for name, _ in rows)
    for name, text in rows:
        typer.echo(f"{name:<{width}}  {text}")


def _place() -> Iterator[Row]:
    """Name what decides which wheels fit, and the environment."""
    python = f"{platform.python_implementation()} {platform.python_version()}"
    libc = " ".join(platform.libc_ver())
    places = (python, f"{platform.system()} {platform.machine()}", libc)
    yield "machine", ", ".join(filter(None, places))
    yield "environment", sys.prefix


def _mpi() -> Iterator[Row]:
    """Say which MPI library mpi4py loads, where it comes from, and what starts its ranks."""
    from hpctrain.core.errors import LaunchError  # noqa: PLC0415
    from hpctrain.launch import pmi  # noqa: PLC0415
    from hpctrain.launch.mpirun import find_mpirun  # noqa: PLC0415

    try:
        library = pmi.libmpi()
        wheel = _wheel_of(library)
        yield "MPI library", f"{library.name} of {wheel}" if wheel else str(library)
        yield "srun", f"--mpi={pmi.needed_pmi(library)}"
        found = find_mpirun()
        yield "mpirun", f"{found.path}, {found.flavour} {found.version}"
    except LaunchError as error:
        yield "MPI", str(error)


def _wheel_of(library: Path) -> str:
    """Return the package that brought an MPI library, empty where the system or a site did."""
    from hpctrain.cluster.libraries import MPI_WHEELS  # noqa: PLC0415

    for name in MPI_WHEELS:
        with suppress(metadata.PackageNotFoundError):
            found = metadata.distribution(name)
            places = (Path(str(file.locate())) for file in found.files or ())
            if any(place.name == library.name and place.samefile(library) for place in places):
                return f"{name}=={found.version}"
    return ""


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
    """List hpctrain, and what is installed of its own requirements and of its extras'."""
    texts = metadata.requires("hpctrain") or ()
    for name in dict.fromkeys(["hpctrain", *(re.split(r"[^\w.-]", text)[0] for text in texts)]):
        with suppress(metadata.PackageNotFoundError):
            found = metadata.distribution(name)
            origin = found.read_text("direct_url.json")
            yield name, found.version + (f" from {json.loads(origin)['url']}" if origin else "")
