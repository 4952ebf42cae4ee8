"""Folders of images or ``.npy`` arrays: one sample per file, one folder per class."""

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.packing.files import (
    IMAGE_ENDINGS,
    Form,
    decoded,
    ending_of,
    files_below,
    form_of_images,
)
from hpctrain.data.packing.source import (
    NUM_EXAMINED,
    Array,
    PackSource,
    Sample,
    WantedFields,
    chosen,
)

LABEL = "label"
_MAX_THREADS = 8
_SPLITS = frozenset(
    ("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing")
)


def open_folder(path: Path, wanted: WantedFields) -> PackSource:
    """Return the source for a folder of images or arrays; each folder in it is a class.

    Classes are numbered in the order of their names. Images are packed as pixels if the 64 images
    that are examined have the same size, or ``wanted.resize`` is given. Otherwise, and with
    ``wanted.encoded``, images are packed as the bytes of their files.
    """
    links: list[str] = []
    files = list(files_below(path, links))
    pictures = [file for file in files if ending_of(file) in IMAGE_ENDINGS]
    arrays = [file for file in files if ending_of(file) == ".npy"]
    if bool(pictures) == bool(arrays):
        raise DataError(
            f"a folder of samples must have either images or .npy arrays below it, but {path} has "
            f"{len(pictures)} images and {len(arrays)} arrays; use another folder, or --as KIND"
        )
    what: Literal["image", "array"] = "image" if pictures else "array"
    if what == "array" and (wanted.resize or wanted.encoded):
        raise DataError(
            f"--resize and --encoded must be used with images, but {path} has arrays; omit them"
        )
    mine = pictures or arrays
    classes, labels = _classes(path, mine)
    if classes:
        _check_classes(path, classes, links, what)
    names = chosen([what, LABEL] if classes else [what], wanted.fields, f"the folder {path}")
    notes = tuple(_notes(path, classes, len(files) - len(mine), links, what))
    some = np.unique(np.linspace(0, len(mine) - 1, NUM_EXAMINED).astype(np.int64))
    form: Form = what
    if what in names.values() and what == "image":
        contents = {mine[index]: Path(mine[index]).read_bytes() for index in some.tolist()}
        form, more = form_of_images(contents, wanted, str(path))
        notes += more
    take = partial(_take, mine, labels, names, partial(decoded, form=form, resize=wanted.resize))
    folder = PackSource(
        files=mine, runs=[(len(mine), take)], classes=classes, notes=notes, origins=names
    )
    as_bytes = [name for name, one in names.items() if one != LABEL and form == "bytes"]
    folder.learn(take(some), [*wanted.ragged, *as_bytes], str(path))
    return folder


def _take(
    files: Sequence[str],
    labels: NDArray[np.int64],
    names: Mapping[str, str],
    decode: Callable[..., Array],
    indices: NDArray[np.int64],
) -> list[Sample]:
    """Read files and find their classes in several threads, as decoders release the GIL."""

    def read(index: int) -> Sample:
        path = files[index]
        return path, {
            name: np.asarray(labels[index])
            if what == LABEL
            else decode(Path(path).read_bytes(), what=path)
            for name, what in names.items()
        }

    with ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), _MAX_THREADS)) as pool:
        return list(pool.map(read, indices.tolist()))


def _notes(
    path: Path, classes: Sequence[str], num_others: int, links: Sequence[str], what: str
) -> Iterator[str]:
    if num_others:
        are_no = f"is no {what}" if num_others == 1 else f"are no {what}s"
        yield f"{num_others} file{'s' * (num_others > 1)} below {path} {are_no} and not packed"
    if links:
        yield f"links to a parent folder are skipped: {', '.join(links)}"
    if classes and _SPLITS.issuperset(map(str.lower, classes)):
        yield (
            f"the classes of {path} are named like splits: {', '.join(classes)}; if they are "
            f"splits, pack each folder separately: {path / classes[0]}, ..."
        )


def _classes(root: Path, files: Sequence[str]) -> tuple[tuple[str, ...], NDArray[np.int64]]:
    """Return the class names, which are folders in ``root``, and the class index of each file."""
    start = len(f"{str(root).rstrip('/')}/")
    tops = [file[start:].rpartition("/")[0].partition("/")[0] for file in files]
    classes = sorted(set(tops) - {""})
    if classes and "" in tops:
        raise DataError(
            f"either all files or none must be in folders, one for each class, but "
            f"{files[tops.index('')]} is next to {root / classes[0]}; move it"
        )
    for name in classes:
        if not _is_line(name):
            raise DataError(
                f"the name of a class must be one line of UTF-8, but a folder in {root} is "
                f"{os.fsencode(name)!r}; rename it"
            )
    number = {name: index for index, name in enumerate(classes)}
    return tuple(classes), np.array([number.get(top, 0) for top in tops], np.int64)


def _check_classes(root: Path, classes: Sequence[str], links: Sequence[str], what: str) -> None:
    """Raise ``DataError`` if a class has no samples.

    Omitting the class would change the numbers of the classes after it.
    """
    with os.scandir(root) as entries:
        folders = {entry.name for entry in entries if entry.is_dir() and entry.path not in links}
    lacking = sorted(name for name in folders - set(classes) if not name.startswith("."))
    if lacking:
        raise DataError(
            f"each folder of a class must have {what}s, but there is none below "
            f"{', '.join(str(root / name) for name in lacking)}; restore the files or remove the "
            f"folder"
        )


def _is_line(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return "\n" not in name and "\r" not in name
