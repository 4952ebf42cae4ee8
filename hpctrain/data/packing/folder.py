"""Folders of images or of ``.npy`` arrays, one file a sample, by class."""

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.packing import images
from hpctrain.data.packing.arrays import load_array
from hpctrain.data.packing.files import Paths, ending_of, files_below
from hpctrain.data.packing.sample_batches import (
    NUM_EXAMINED,
    Sample,
    check_shapes,
    fields_of,
    stacked,
)
from hpctrain.data.packing.source import Array, Batch, Indexed, WantedFields, chosen

LABEL = "label"
_MAX_THREADS = 8
_SPLITS = frozenset(
    ("train", "training", "val", "valid", "validation", "dev", "eval", "test", "testing")
)


@dataclass(kw_only=True)
class Folder(Indexed):
    """Files below a folder, sorted by name; a file's class is the first folder of its path."""

    content: str
    """``array``, ``image`` (pixels) or ``encoded`` (the bytes of the files)."""
    names: dict[str, str]
    """Field -> ``image``, ``array`` or ``label``."""
    labels: NDArray[np.int64] | None
    resize: images.Size | None
    _pool: ThreadPoolExecutor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        """Return the number of files."""
        return len(self.files)

    def take(self, indices: NDArray[np.int64]) -> Batch:
        """Read files, on several threads: decoders of images let each other run."""
        if self._pool is None:
            num_threads = min(len(os.sched_getaffinity(0)), _MAX_THREADS)
            self._pool = ThreadPoolExecutor(num_threads)
        samples = list(self._pool.map(self.sample, indices.tolist()))
        for sample in samples:
            check_shapes(sample, self.fields)
        return stacked(samples, self.fields)

    def sample(self, index: int) -> Sample:
        """Read a file and look up its class."""
        path = self.files[index]
        arrays: dict[str, Array] = {}
        for name, what in self.names.items():
            if what == LABEL:
                assert self.labels is not None
                arrays[name] = np.asarray(self.labels[index])
            else:
                arrays[name] = self._content(path)
        return str(path), arrays

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the threads."""
        return {**self.__dict__, "_pool": None}

    def _content(self, path: Path) -> Array:
        if self.content == "array":
            return load_array(path)
        data = path.read_bytes()
        if self.content == "encoded":
            return images.raw(data)
        return images.pixels(data, str(path), self.resize)


def open_folder(path: Path, wanted: WantedFields) -> Folder:
    """Examine a folder of images or arrays; with folders in it, each of them is a class.

    Classes are numbered in the order of their names. Images all of one size, as 64 of them
    show, are packed as pixels, as they are also with ``resize``; else as the bytes of their files.

    Raises:
        DataError: there are neither images nor arrays, or both, or files beside classes.
    """
    links: list[str] = []
    files = list(files_below(path, links))
    found = {
        "image": [file for file in files if ending_of(file) in images.ENDINGS],
        "array": [file for file in files if ending_of(file) == ".npy"],
    }
    if bool(found["image"]) == bool(found["array"]):
        raise DataError(
            f"a folder of samples has images or .npy arrays below it, {path} has "
            f"{len(found['image'])} images and {len(found['array'])} arrays; "
            f"name another folder, or the kind of the source: --as KIND"
        )
    what = "image" if found["image"] else "array"
    mine = Paths(found[what])
    if what == "array" and (wanted.resize or wanted.encoded):
        raise DataError(f"--resize and --encoded are for images, {path} has arrays")
    classes, labels = _classes(path, mine)
    if classes:
        _check_classes(path, classes, links, what)
    available = [what, LABEL] if classes else [what]
    folder = Folder(
        fields={},
        files=mine,
        classes=classes,
        content=what,
        names=chosen(available, wanted.fields, f"the folder {path}"),
        labels=labels,
        resize=wanted.resize,
    )
    if others := len(files) - len(mine):
        are_no = f"is no {what}" if others == 1 else f"are no {what}s"
        folder.notes += (f"{others} file{'s' * (others > 1)} below {path} {are_no}: left out",)
    if links:
        folder.notes += (f"links to a folder above are left out: {', '.join(links)}",)
    if classes and _SPLITS.issuperset(map(str.lower, classes)):
        note = f"the classes of {path} are named like splits: {', '.join(classes)}; if they are "
        folder.notes += (f"{note}splits, pack each by itself: {path / classes[0]}, ...",)
    _examine(folder, path, wanted)
    return folder


def _classes(root: Path, files: Paths) -> tuple[tuple[str, ...], NDArray[np.int64] | None]:
    start = len(os.path.join(root, ""))  # noqa: PTH118 - with the slash at its end
    tops = [text[start:].rpartition("/")[0].partition("/")[0] for text in files.texts]
    classes = sorted(set(tops) - {""})
    if not classes:
        return (), None
    if "" in tops:
        raise DataError(
            f"either all files lie in folders, one for each class, or none does: "
            f"{files[tops.index('')]} lies beside {root / classes[0]}; move it"
        )
    for name in classes:
        if not _is_line(name):
            raise DataError(
                f"the name of a class is one line of text in UTF-8, a folder in {root} is "
                f"{os.fsencode(name)!r}; rename it"
            )
    number = {name: index for index, name in enumerate(classes)}
    return tuple(classes), np.array([number[top] for top in tops], np.int64)


def _check_classes(root: Path, classes: Sequence[str], links: Sequence[str], what: str) -> None:
    """Check that each folder is a class: without one, the others would have other numbers."""
    with os.scandir(root) as entries:
        folders = {entry.name for entry in entries if entry.is_dir() and entry.path not in links}
    lacking = sorted(name for name in folders - set(classes) if not name.startswith("."))
    if lacking:
        raise DataError(
            f"each folder beside classes is one and has {what}s, there is none below "
            f"{', '.join(str(root / name) for name in lacking)}; bring them back, or remove the "
            f"folder"
        )


def _is_line(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return "\n" not in name and "\r" not in name


def _examine(folder: Folder, path: Path, wanted: WantedFields) -> None:
    """Learn the fields from some files, evenly spread: classes differ."""
    some = np.unique(np.linspace(0, len(folder) - 1, NUM_EXAMINED).astype(np.int64))
    if folder.content == "image" and wanted.encoded:
        folder.content = "encoded"
    elif folder.content == "image" and not wanted.resize and "image" in folder.names.values():
        files = [folder.files[index] for index in some]
        sizes = {images.size_of(file, str(file)) for file in files}
        if len(sizes) > 1:
            folder.content = "encoded"
            folder.notes += (images.kept_encoded(sizes, str(path)),)
    ragged = list(wanted.ragged)
    if folder.content == "encoded":
        ragged += [name for name, what in folder.names.items() if what == "image"]
    samples = [folder.sample(int(index)) for index in some]
    folder.fields, folder.mean_lengths = fields_of(samples, ragged, str(path))
