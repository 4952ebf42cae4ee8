"""The names of classes: in the manifest, and for people in a file beside it."""

from pathlib import Path

from hpctrain.core.atomic import publishing
from hpctrain.data.format.layout import Manifest

CLASSES = "classes.txt"
"""The name of label 0 in the first line, and so on."""


def classes_of(directory: Path, manifest: Manifest) -> tuple[str, ...]:
    """Return the names of the labels 0, 1, ...; of an old data set, those in the file."""
    return manifest.classes or read_classes(directory)


def read_classes(directory: Path) -> tuple[str, ...]:
    """Return the names in the file; none where there is no such file."""
    try:
        text = (directory / CLASSES).read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ()
    # splitlines() would cut at characters that a name may hold.
    return tuple(text.removesuffix("\n").split("\n")) if text else ()


def write_classes(directory: Path, classes: tuple[str, ...]) -> None:
    """Write the file, if there are classes.

    Raises:
        OSError: the file system refuses.
    """
    if classes:
        with publishing(directory / CLASSES) as part:
            part.write_text("".join(f"{name}\n" for name in classes), encoding="utf-8")
