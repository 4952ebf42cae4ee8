"""Archives in webdataset format: files whose names differ only in the ending are one sample."""

import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Any

from hpctrain.core.errors import DataError
from hpctrain.core.python_compat import Self
from hpctrain.core.units import GIB, MIB, format_bytes
from hpctrain.data.packing.files import (
    IMAGE_ENDINGS,
    Form,
    decoded,
    ending_of,
    form_of_images,
    is_number,
    unpacked,
)
from hpctrain.data.packing.source import (
    NUM_EXAMINED,
    PackSource,
    Sample,
    WantedFields,
    chosen,
    picked,
    readable,
)

Contents = tuple[str, dict[str, bytes]]  # key of a sample, and the contents of its files by suffix

MAX_SAMPLE_BYTES = GIB
"""Maximum size of the files of a sample, because an archive of a few KB can claim any size."""

_MAX_HEADER_BYTES = MIB  # maximum size of an extended header, which tarfile reads into memory

_UNREADABLE = (tarfile.TarError, EOFError, zlib.error, OSError)
_ALWAYS_NUMBERS = (".cls", ".id", ".index")
_MAYBE_NUMBERS = (".txt", ".json")
_NOTES = frozenset(
    (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )
)


def open_tar(files: Sequence[str], wanted: WantedFields) -> PackSource:
    """Return the source for archives in the format of webdataset.

    The files with the same ending become a field, by default with the name of the ending. Images
    become pixels if the first samples have one size or ``wanted.resize`` is given. Files ``.npy``
    become arrays, ``.cls`` integers, ``.txt`` and ``.json`` numbers if the first samples are
    numbers. All other files, and endings that ``wanted.fields`` names as ``ENDING:bytes``, stay
    bytes; with ``wanted.encoded``, images too.
    """
    where = files[0]
    asked = {name: ending.partition(":")[0].lstrip(".") for name, ending in wanted.fields.items()}
    for name, ending in wanted.fields.items():
        if ending.partition(":")[2] not in ("", "bytes"):
            raise DataError(
                f"--field of an archive must be NAME=ENDING, NAME=ENDING:bytes or a type such as "
                f"NAME=ENDING:f4, got {name}={ending}; correct it"
            )
    some = list(islice(samples_in(where, tuple(asked.values())), NUM_EXAMINED))
    if not some:
        raise DataError(
            f"an archive of webdataset must have files such as 0001.jpg and 0001.cls, but "
            f"{where} has none{' with these endings' if asked else ''}; remove it from the "
            f"source"
        )
    endings = chosen(list(some[0][1]), asked, where)
    forms: dict[str, Form] = {}
    notes: list[str] = []
    for name, ending in endings.items():
        contents = {f"{key}.{ending}": one[ending] for key, one in some if ending in one}
        forms[name] = "bytes"
        if not wanted.fields.get(name, "").endswith(":bytes"):
            forms[name], more = _form(ending, contents, wanted, where)
            notes += more
    decode = partial(_decoded, endings, forms, wanted)
    parts = [(None, partial(_read, file, tuple(asked.values()), decode)) for file in files]
    found = PackSource(files=files, parts=parts, notes=tuple(notes), origins=endings)
    ragged = [*wanted.ragged, *(name for name, form in forms.items() if form == "bytes")]
    found.learn(map(decode, some), ragged, where)
    return found


def _read(
    path: str, wanted: Sequence[str], decode: Callable[[Contents], Sample]
) -> Iterator[Sample]:
    return map(decode, samples_in(path, wanted))


def _decoded(
    endings: Mapping[str, str], forms: Mapping[str, Form], wanted: WantedFields, contents: Contents
) -> Sample:
    """Decode the files of a sample."""
    where, found = contents
    mine = picked(where, found, endings, takes_all=not wanted.fields)
    return where, {
        name: decoded(content, forms[name], f"{where}.{endings[name]}", wanted.resize)
        for name, content in mine.items()
    }


def _form(
    ending: str, contents: Mapping[str, bytes], wanted: WantedFields, where: str
) -> tuple[Form, tuple[str, ...]]:
    last = ending_of(f"_.{ending}")
    if last in IMAGE_ENDINGS:
        return form_of_images(contents, wanted, where)
    if last == ".npy":
        return "array", ()
    may_be = last in _MAYBE_NUMBERS and all(map(is_number, contents.values()))
    return "number" if may_be or last in _ALWAYS_NUMBERS else "bytes", ()


def samples_in(path: str, wanted: Sequence[str]) -> Iterator[Contents]:
    """Yield the samples of an archive, with the files whose ending is in ``wanted``.

    If ``wanted`` is empty, all files of the samples are read.
    """
    key = ""
    contents: dict[str, bytes] = {}
    before: set[str] = set()
    with readable(path, "an archive", *_UNREADABLE):
        for name, num_bytes, read in _files_in(path):
            folder, _, last = name.rpartition("/")
            stem, _, ending = last.partition(".")
            if not stem or not ending or stem.startswith("__"):
                continue
            if f"{folder}/{stem}" != key and contents:
                yield f"{path}:{key}", contents
                contents = {}
                before.add(key)
            key = f"{folder}/{stem}"
            if wanted and ending not in wanted:
                continue
            if key in before:
                raise DataError(
                    f"the files of a sample must be next to each other, but a .{ending} of "
                    f"{path}:{key} follows other samples; rewrite the archive with tar "
                    f"--sort=name, and give each sample its own name"
                )
            claimed = num_bytes + sum(map(len, contents.values()))
            _check_file(f"{path}:{key}", ending, claimed, contents)
            contents[ending] = read()
    if contents:
        yield f"{path}:{key}", contents


def _check_file(sample: str, ending: str, claimed: int, before: Mapping[str, bytes]) -> None:
    if ending in before:
        raise DataError(
            f"the files of a sample must have different endings, but {sample} has two .{ending}; "
            f"give each sample its own name"
        )
    if claimed > MAX_SAMPLE_BYTES:
        raise DataError(
            f"the files of a sample must have at most {format_bytes(MAX_SAMPLE_BYTES)} together, "
            f"but {sample} claims {format_bytes(claimed)}; name some of its endings, "
            f"--field NAME=ENDING, or pack samples of this size with a Python function"
        )


def _files_in(path: str) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """Yield name, size and reader of each file of an archive.

    Unlike tarfile, raises an error if the archive is truncated or if another archive follows.
    """
    has_ended = False

    class Header(tarfile.TarInfo):
        """Header that detects the end of an archive and rejects large extended headers."""

        @classmethod
        def frombuf(cls, buf: Any, encoding: str, errors: str) -> Self:
            """Parse a header; raise ``ReadError`` for an extended header that is too large."""
            nonlocal has_ended
            has_ended = bool(buf) and not any(buf)
            header = super().frombuf(buf, encoding, errors)
            if header.type in _NOTES and header.size > _MAX_HEADER_BYTES:
                raise tarfile.ReadError(f"an extended header has {format_bytes(header.size)}")
            return header

    with unpacked(path) as file, tarfile.open(fileobj=file, mode="r|", tarinfo=Header) as archive:
        for member in archive:
            if member.issym() or member.islnk():
                raise DataError(
                    f"an archive must contain the files of samples, but {member.name} of {path} "
                    f"is a link to {member.linkname}; rewrite it with tar "
                    f"--dereference --hard-dereference"
                )
            if content := archive.extractfile(member) if member.isfile() else None:
                yield member.name, member.size, content.read
        if not has_ended:
            raise tarfile.ReadError("the end of the archive is missing")
        _check_rest(archive.fileobj, path)


def _check_rest(stream: Any, path: str) -> None:
    """Check that only zeros follow an archive; reading to the end also checks gzip's crc32."""
    at = stream.tell()
    while piece := stream.read(MIB):
        if more := piece.lstrip(b"\0"):
            raise DataError(
                f"an archive must end with blocks of zeros, but in {path} other data follow the "
                f"zeros at byte {at + len(piece) - len(more)}: the file is damaged, or consists "
                f"of several archives; download it again, or unpack it with "
                f"tar --ignore-zeros -xf and archive the files again"
            )
        at += len(piece)
