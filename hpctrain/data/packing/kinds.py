"""Kinds of sources by name, and how each is opened."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain, islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import MANIFEST
from hpctrain.data.packing import images
from hpctrain.data.packing.arrays import open_arrays
from hpctrain.data.packing.files import check_file, ending_of, files_below
from hpctrain.data.packing.folder import open_folder
from hpctrain.data.packing.hdf5 import open_hdf5
from hpctrain.data.packing.named import NAME
from hpctrain.data.packing.python import open_python
from hpctrain.data.packing.source import Batch, Indexed, Source, WantedFields
from hpctrain.data.packing.table import open_csv, open_parquet
from hpctrain.data.packing.tar import open_tar
from hpctrain.data.packing.text import open_text


@dataclass(kw_only=True)
class Joined(Indexed):
    """Sources, the samples of the first one first."""

    parts: Sequence[Indexed]

    def __len__(self) -> int:
        """Return the number of samples of all."""
        return sum(map(len, self.parts))

    def take(self, indices: NDArray[np.int64]) -> Batch:
        """Gather samples from their sources."""
        ends = np.cumsum([len(part) for part in self.parts])
        homes = np.searchsorted(ends, indices, side="right")
        order = np.argsort(homes, kind="stable")
        pieces = []
        for home in np.unique(homes):
            part = self.parts[home]
            inside = indices[homes == home] - (ends[home] - len(part))
            pieces.append(part.take(inside))
        back = np.argsort(order)
        batch: Batch = {}
        for name, one in self.fields.items():
            if one.ragged:
                rows = list(chain.from_iterable(piece[name] for piece in pieces))
                batch[name] = [rows[index] for index in back]
            else:
                batch[name] = np.concatenate([piece[name] for piece in pieces])[back]
        return batch


def open_joined(
    files: Sequence[Path], wanted: WantedFields, open_one: Callable[[Path, WantedFields], Indexed]
) -> Indexed:
    """Examine one file, or several of the same fields.

    Raises:
        DataError: their fields differ.
    """
    parts = [open_one(path, wanted) for path in files]
    first = parts[0]
    if len(parts) == 1:
        return first
    for path, part in zip(files, parts, strict=True):
        if part.fields != first.fields:
            raise DataError(
                f"files that are packed together have the same fields: {files[0]} has "
                f"{dict(first.fields)}, {path} has {dict(part.fields)}; pack them one by one"
            )
    return Joined(
        fields=first.fields,
        files=sorted({file for part in parts for file in part.files}),
        mean_lengths=first.mean_lengths,
        notes=tuple(dict.fromkeys(chain.from_iterable(part.notes for part in parts))),
        parts=parts,
    )


Files = Sequence[Path]

_NUM_LOOKED_AT = 10_000
"""Files from which the kind of a folder is told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceKind:
    """A kind of source that consists of files."""

    endings: tuple[str, ...]
    open: Callable[[Files, WantedFields], Source]
    options: frozenset[str] = frozenset()
    """Of ``WantedFields``, besides ``fields``: those that mean something here."""


KINDS = {
    "arrays": SourceKind(
        endings=(".npy", ".npz"), open=partial(open_joined, open_one=open_arrays)
    ),
    "hdf5": SourceKind(
        endings=(".h5", ".hdf5", ".hdf", ".he5"), open=partial(open_joined, open_one=open_hdf5)
    ),
    "tar": SourceKind(
        endings=(".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz"),
        open=open_tar,
        options=frozenset({"ragged", "resize", "encoded"}),
    ),
    "csv": SourceKind(endings=(".csv", ".tsv"), open=open_csv),
    "parquet": SourceKind(endings=(".parquet", ".pq"), open=open_parquet),
    "text": SourceKind(
        endings=(".txt", ".text"),
        open=open_text,
        options=frozenset({"per", "length", "tokenizer"}),
    ),
}
FOLDER, PYTHON = "folder", "python"
ALL = (*KINDS, FOLDER, PYTHON)

_OPTIONS = {FOLDER: frozenset({"ragged", "resize", "encoded"}), PYTHON: frozenset({"ragged"})}


def open_source(source: object, kind: str | None, wanted: WantedFields) -> Source:
    """Examine what is to be packed.

    Args:
        source: path of a file or a folder, a pattern with ``*``, ``module:function``, or a
            Python object.
        kind: one of ``ALL``; None to find it out.
        wanted: what of it.

    Raises:
        DataError: there is no such source, its kind is not clear, or it cannot be read.
    """
    if kind is not None and kind not in ALL:
        raise DataError(f"a kind of source is one of {', '.join(ALL)}, got {kind!r}")
    if not isinstance(source, str | Path):
        kind = PYTHON
    kind = kind or kind_of(str(source))
    _check_options(kind, wanted)
    if kind == PYTHON:
        return open_python(str(source) if isinstance(source, Path) else source, wanted)
    path = Path(str(source))
    if kind == FOLDER:
        if not path.is_dir():
            raise DataError(f"{path} must be a folder to be packed as one; check the path")
        return open_folder(path, wanted)
    return KINDS[kind].open(_files(path, kind), wanted)


def kind_of(source: str) -> str:
    """Return the kind that a name means.

    Raises:
        DataError: there is nothing of this name, or it can be of several kinds or of none.
    """
    path = Path(source)
    if path.is_dir():
        return _kind_of_folder(path)
    if not path.exists() and NAME.fullmatch(source):
        return PYTHON
    kinds = {_kind_of_file(file.name) for file in _matching(path)}
    if len(kinds) != 1 or None in kinds:
        raise DataError(
            f"a source ends in one of {_endings()}; {source} does not say what it is; "
            f"say it: --as {'|'.join(ALL)}"
        )
    return str(kinds.pop())


def _kind_of_folder(path: Path) -> str:
    if (path / MANIFEST).exists():
        raise DataError(
            f"{path} is a data set already; to cut it into other shards: "
            f"hpctrain data reshard {path}"
        )
    some = list(islice(files_below(path), _NUM_LOOKED_AT))
    found = Counter(filter(None, map(_kind_of_file, some)))
    if any(ending_of(file) in images.ENDINGS or ending_of(file) == ".npy" for file in some):
        return FOLDER
    if len(found) != 1:
        listed = ", ".join(f"{count} of {kind}" for kind, count in found.items())
        raise DataError(
            f"a folder has images, .npy arrays, or files that end in one of {_endings()}, "
            f"all of one kind; {path} has {listed or 'none of them'}; say it: --as KIND"
        )
    return str(next(iter(found)))


def _kind_of_file(name: str) -> str | None:
    name = name.lower()
    kinds = [kind for kind, one in KINDS.items() if name.endswith(one.endings)]
    return kinds[0] if kinds else None


def _files(path: Path, kind: str) -> list[Path]:
    if not path.is_dir():
        return _matching(path)
    below = list(files_below(path))
    files = [Path(file) for file in below if _kind_of_file(file) == kind]
    if kind == "text" and not files:
        files = list(map(Path, below))
    if not files:
        raise DataError(
            f"a folder of {kind} has files that end in {', '.join(KINDS[kind].endings)}, "
            f"{path} has none; check the path"
        )
    return files


def _matching(path: Path) -> list[Path]:
    if path.exists():
        check_file(path)
        return [path]
    pattern = str(path.relative_to(path.anchor))
    found = sorted(one for one in Path(path.anchor).glob(pattern) if not one.is_dir())
    for one in found:
        check_file(one)
    if not found:
        raise DataError(
            f"there is no {path}; give a file, a folder, a pattern in quotes such as "
            f"'shards/*.tar', or module:function"
        )
    return found


def _check_options(kind: str, wanted: WantedFields) -> None:
    """Refuse what would have no effect."""
    options = _OPTIONS[kind] if kind in _OPTIONS else KINDS[kind].options
    for one in fields(WantedFields):
        given = getattr(wanted, one.name) != getattr(WantedFields(), one.name)
        if given and one.name != "fields" and one.name not in options:
            takers = [
                name
                for name in ALL
                if one.name in (_OPTIONS[name] if name in _OPTIONS else KINDS[name].options)
            ]
            raise DataError(
                f"--{one.name} is for {', '.join(takers)}, this source is {kind}; leave it out"
            )


def _endings() -> str:
    return " ".join(ending for kind in KINDS.values() for ending in kind.endings)
