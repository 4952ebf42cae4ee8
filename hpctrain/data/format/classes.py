"""The names of classes, in a file beside the manifest."""

from pathlib import Path
from typing import TYPE_CHECKING

from hpctrain.comm.agreement import agreed
from hpctrain.core.atomic import publishing
from hpctrain.core.errors import DataError
from hpctrain.data.format.publication import explained

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

CLASSES = "classes.txt"
"""The name of label 0 in the first line, and so on."""


def read_classes(directory: Path) -> tuple[str, ...]:
    """Return the names of the labels 0, 1, ...; none where there is no such file."""
    try:
        text = (directory / CLASSES).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ()
    # splitlines() would cut at characters that a name may hold.
    return tuple(text.removesuffix("\n").split("\n")) if text else ()


def carry_classes(source: Path, target: Path, comm: "Communicator") -> None:
    """Copy the names of classes to a data set that has none. Collective.

    Raises:
        DataError: the disk refuses; on every rank.
    """
    with agreed(comm, DataError), explained(target):
        is_wanted = (source / CLASSES).exists() and not (target / CLASSES).exists()
        if comm.rank == 0 and is_wanted:
            with publishing(target / CLASSES) as part:
                part.write_bytes((source / CLASSES).read_bytes())
