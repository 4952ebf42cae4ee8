"""``hpctrain status``: how it stands with a run, for people and for batch scripts."""

from pathlib import Path
from typing import Annotated

import typer


def status(
    directory: Annotated[
        Path,
        typer.Argument(metavar="RUN_DIRECTORY", help="The run's folder.", show_default=False),
    ],
) -> None:
    """Tell whether a run is finished, by its own last record, and which job is at work in it.

    The exit code is 0 for a finished run, 85 for one that has stopped and wants to go on, and 1
    for one that has failed, is still at work, was ended without a word, or is not there. A
    launcher's own exit code says less: it may be 0 after a node was lost.

    For instance:

      hpctrain status runs/digits

      hpctrain status runs/digits || echo "not finished"
    """
    from hpctrain.train.status import status as status_of  # noqa: PLC0415

    found = status_of(directory)
    typer.echo(found.what)
    raise typer.Exit(found.code)
