"""Kinds of sources by name, and the function that opens a source of each kind."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import Any

from hpctrain.core.errors import DataError
from hpctrain.core.target import NAME
from hpctrain.core.units import plural
from hpctrain.data.format.dataset_manifest import MANIFEST
from hpctrain.data.packing.arrays import open_arrays, open_hdf5
from hpctrain.data.packing.files import IMAGE_ENDINGS, check_file, ending_of, files_below
from hpctrain.data.packing.folder import open_folder
from hpctrain.data.packing.python import open_python
from hpctrain.data.packing.source import NUMBER_TYPE, PackSource, WantedFields, needed
from hpctrain.data.packing.tar import open_tar
from hpctrain.data.packing.text import open_text


def _table(opener: str, what: str) -> Callable[[Sequence[str], WantedFields], PackSource]:
    def opened(files: Sequence[str], wanted: WantedFields) -> PackSource:
        module = needed("hpctrain.data.packing.tabular", what)
        return getattr(module, opener)(files, wanted)  # type: ignore[no-any-return]

    return opened


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceKind:
    """Kind of source: the function that opens it, its file names and its options."""

    open: Callable[[Any, WantedFields], PackSource]
    """Called with the files; for kind folder, with the path of the folder; for kind python, with
    the object or its name."""
    endings: tuple[str, ...] = ()  # suffixes of the files
    options: tuple[str, ...] = ()
    """Options of ``WantedFields`` that this kind takes, in addition to ``fields``."""


FOLDER, PYTHON, TEXT = "folder", "python", "text"
_TABLES = ("csv", "parquet", "arrow")
_OF_IMAGES = ("ragged", "resize", "encoded")

KINDS = {
    "arrays": SourceKind(open=open_arrays, endings=(".npy", ".npz")),
    "hdf5": SourceKind(open=open_hdf5, endings=(".h5", ".hdf5", ".hdf", ".he5")),
    "tar": SourceKind(open=open_tar, endings=(".tar", ".tar.gz", ".tgz"), options=_OF_IMAGES),
    "csv": SourceKind(open=_table("open_csv", "a CSV file"), endings=(".csv", ".tsv")),
    "parquet": SourceKind(
        open=_table("open_parquet", "a Parquet file"), endings=(".parquet", ".pq")
    ),
    "arrow": SourceKind(
        open=_table("open_arrow", "an Arrow file"), endings=(".arrow", ".feather")
    ),
    TEXT: SourceKind(open=open_text, endings=(".txt", ".text"), options=("length", "tokenizer")),
    FOLDER: SourceKind(open=open_folder, options=_OF_IMAGES),
    PYTHON: SourceKind(open=open_python, options=("ragged",)),
}

_NUM_LOOKED_AT = 10_000  # files from which the kind of a folder is inferred


def open_source(source: object, kind: str, wanted: WantedFields) -> PackSource:
    """Return the ``PackSource`` of a source; ``kind`` is a result of ``kind_of``.

    Raises ``DataError``: the source cannot be read, or an option has no effect on this kind.
    """
    _check_options(kind, wanted)
    if kind in _TABLES:  # the functions that open tables convert the types of columns
        found = _opened(source, kind, wanted)
    else:
        names, types = _split_types(wanted.fields)
        found = _opened(source, kind, replace(wanted, fields=names)).with_types(types)
    return replace(found, notes=(*found.notes, *_note_of_doubles(found, wanted.fields)))


def _opened(source: object, kind: str, wanted: WantedFields) -> PackSource:
    if kind == PYTHON:
        return open_python(str(source) if isinstance(source, Path) else source, wanted)
    path = Path(str(source))
    if kind != FOLDER:
        return KINDS[kind].open(_files(path, kind), wanted)
    if not path.is_dir():
        raise DataError(
            f"--as {FOLDER} must be used with a folder, but {path} is none; check the path"
        )
    return open_folder(path, wanted)


def kind_of(source: object, kind: str | None = None) -> str:
    """Return ``kind`` if given, otherwise the kind that the names of the files indicate."""
    if kind is not None and kind not in KINDS:
        raise DataError(f"the kind of a source must be one of {', '.join(KINDS)}, got {kind!r}")
    if not isinstance(source, str | Path):
        return PYTHON
    if kind is not None:
        return kind
    path = Path(source)
    if path.is_dir():
        return _kind_of_folder(path)
    if not path.exists() and NAME.fullmatch(str(source)):
        return PYTHON
    kinds = {_kind_of_file(name) for name in _matching(path)}
    if len(kinds) != 1 or None in kinds:
        raise DataError(
            f"the name of a source must end in one of {_endings()}, got {source}; rename it, "
            f"or set its kind with --as {'|'.join(KINDS)}"
        )
    return str(kinds.pop())


def _kind_of_folder(path: Path) -> str:
    if (path / MANIFEST).exists():
        raise DataError(
            f"the source must not be a data set, but {path} is one; to change its shards: "
            f"hpctrain data reshard {path}"
        )
    some = list(islice(files_below(path), _NUM_LOOKED_AT))
    found = Counter(filter(None, map(_kind_of_file, some)))
    if any(ending_of(file) in {*IMAGE_ENDINGS, ".npy"} for file in some):
        return FOLDER
    if len(found) != 1:
        listed = ", ".join(
            f"{plural(count, 'file')} of kind {kind}" for kind, count in found.items()
        )
        raise DataError(
            f"a folder must have images, .npy arrays, or files of one kind, which end in one of "
            f"{_endings()}, but {path} has {listed or 'no such file'}; set the kind with --as "
            f"KIND"
        )
    return str(next(iter(found)))


def _kind_of_file(name: str) -> str | None:
    name = name.lower()
    return next((kind for kind, one in KINDS.items() if name.endswith(one.endings)), None)


def _files(path: Path, kind: str) -> list[str]:
    if not path.is_dir():
        return _matching(path)
    below = list(files_below(path))
    files = [file for file in below if _kind_of_file(file) == kind]
    if kind == TEXT and not files:
        files = below
    if not files:
        raise DataError(
            f"a folder of {kind} must have files that end in "
            f"{', '.join(KINDS[kind].endings)}, but {path} has none; check the path"
        )
    return files


def _matching(path: Path) -> list[str]:
    found = [path]
    if not path.exists():
        pattern = str(path.relative_to(path.anchor))
        found = sorted(one for one in Path(path.anchor).glob(pattern) if not one.is_dir())
    if not found:
        raise DataError(
            f"a source must exist, but there is no {path}; pass a file, a folder, a pattern in "
            f"quotes such as 'shards/*.tar', or module:function"
        )
    names = list(map(str, found))
    for name in names:
        check_file(name)
    return names


def _check_options(kind: str, wanted: WantedFields) -> None:
    """Raise ``DataError`` for options that have no effect on this kind."""
    usual = WantedFields()
    for name in (one.name for one in fields(WantedFields) if one.name != "fields"):
        if getattr(wanted, name) != getattr(usual, name) and name not in KINDS[kind].options:
            takers = [taker for taker, one in KINDS.items() if name in one.options]
            raise DataError(
                f"--{name} must be used with {', '.join(takers)}, but this source is {kind}; "
                f"omit it"
            )


def _endings() -> str:
    return " ".join(ending for kind in KINDS.values() for ending in kind.endings)


def _split_types(fields: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """Split ``WHAT:TYPE`` of each field; return ``WHAT`` of all fields and the given types."""
    names, types = dict(fields), {}
    for name, what in fields.items():
        origin, _, dtype = what.rpartition(":")
        if origin and NUMBER_TYPE.fullmatch(dtype):
            names[name], types[name] = origin, dtype
    return names, types


_MAX_OPTIONS = 12


def _note_of_doubles(found: PackSource, given: Mapping[str, str]) -> Iterator[str]:
    """Yield a note about fields of float64, except fields that are ``given`` with ``:f8``."""
    doubles = [
        name
        for name, field in found.fields.items()
        if field.dtype == "<f8" and not given.get(name, "").endswith(":f8")
    ]
    if not doubles:
        return
    shown = doubles if len(found.fields) > _MAX_OPTIONS else found.fields
    what = {name: given.get(name) or found.origins.get(name, name) for name in shown}
    typed = {name: f"{each}{':f4' * (name in doubles)}" for name, each in what.items()}
    options = " ".join(f"--field {name}={quote(each)}" for name, each in typed.items())
    others = "" if len(shown) == len(found.fields) else ", and --field for each other field"
    yield (
        f"{', '.join(doubles)}: float64 is stored, which models in float32 do not accept; to "
        f"store float32: {options}{others}"
    )
