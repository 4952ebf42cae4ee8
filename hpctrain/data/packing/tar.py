"""Archives of webdataset: files whose names differ in their ending are one sample."""

import bz2
import gzip
import json
import lzma
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedReader, BytesIO, RawIOBase
from itertools import islice
from pathlib import Path
from typing import IO, Any, Literal, Self

import numpy as np

from hpctrain.core.atomic import reason_of
from hpctrain.core.errors import DataError
from hpctrain.core.units import GIB, MIB, format_bytes
from hpctrain.data.packing import images
from hpctrain.data.packing.sample_batches import NUM_EXAMINED, Sample, batched, fields_of
from hpctrain.data.packing.source import Array, Batch, Streamed, WantedFields, chosen

Form = Literal["image", "array", "number", "bytes"]
Files = tuple[str, dict[str, bytes]]
"""Key of a sample, and the contents of its files by ending."""

MAX_SAMPLE_BYTES = GIB
"""Of the files of a sample: what an archive of a few KB can claim to hold has no end."""

_MAX_HEADER_BYTES = MIB
"""Of long names and other notes on a file, which tarfile reads into memory."""

_ALWAYS_NUMBERS = ("cls", "id", "index")
_MAYBE_NUMBERS = ("txt", "json")
_NOTES = frozenset(
    (
        tarfile.XHDTYPE,
        tarfile.XGLTYPE,
        tarfile.SOLARIS_XHDTYPE,
        tarfile.GNUTYPE_LONGNAME,
        tarfile.GNUTYPE_LONGLINK,
    )
)


@dataclass(kw_only=True)
class Tar(Streamed):
    """Samples of archives, in the order in which they lie there."""

    forms: dict[str, Form]
    """What the content of each field's file becomes."""
    endings: dict[str, str]
    """Ending of each field's file."""
    takes_all: bool
    """Whether these are all that the archive shall have."""
    resize: images.Size | None

    @property
    def num_parts(self) -> int:
        """Archives."""
        return len(self.files)

    def batches(self, part: int) -> Iterator[Batch]:
        """Read an archive."""
        path = self.files[part]
        wanted = {} if self.takes_all else self.endings
        return batched(map(self.sample, samples_in(path, wanted)), self.fields)

    def sample(self, files: Files) -> Sample:
        """Decode the files of a sample.

        Raises:
            DataError: one is missing, or is not what those before it were.
        """
        where, contents = files
        arrays = {}
        if more := self.takes_all and sorted({*contents} - {*self.endings.values()}):
            raise DataError(
                f"all samples have the same endings: {where} has a .{more[0]}, which the first "
                f"sample lacks; complete the archive, or name the endings to take, --field "
                f"NAME=ENDING"
            )
        for name, ending in self.endings.items():
            if ending not in contents:
                raise DataError(
                    f"all samples have the same endings: {where} has no .{ending}; "
                    f"name those that all have: --field NAME=ENDING"
                )
            what = f"{where}.{ending}"
            arrays[name] = _decoded(contents[ending], self.forms[name], what, self.resize)
        return where, arrays


def open_tar(files: Sequence[Path], wanted: WantedFields) -> Tar:
    """Examine archives.

    A field is named after an ending. Images become pixels if those of the first samples have one
    size or ``resize`` is given, else they stay bytes; ``.npy`` become arrays, ``.cls`` whole
    numbers, ``.txt`` and ``.json`` numbers where those of the first samples are; all else stays
    bytes, as does an ending that is wanted as ``ENDING:bytes``.

    Raises:
        DataError: an archive cannot be read or has no samples.
    """
    asked = {name: ending.partition(":")[0].lstrip(".") for name, ending in wanted.fields.items()}
    for name, ending in wanted.fields.items():
        if ending.partition(":")[2] not in ("", "bytes"):
            raise DataError(f"--field {name}={ending}: an ending can be followed by :bytes alone")
    some = list(islice(samples_in(files[0], asked), NUM_EXAMINED))
    if not some:
        raise DataError(
            f"an archive of webdataset has files such as 0001.jpg and 0001.cls, {files[0]} has "
            f"none{' of these endings' if asked else ''}; take it out of the source"
        )
    endings = chosen(list(some[0][1]), asked, str(files[0]))
    found = Tar(
        fields={},
        files=files,
        forms={},
        endings=endings,
        takes_all=not asked,
        resize=wanted.resize,
    )
    for name, ending in endings.items():
        is_bytes = wanted.fields.get(name, "").endswith(":bytes")
        contents = [sample[1][ending] for sample in some if ending in sample[1]]
        found.forms[name] = "bytes" if is_bytes else _form(ending, contents, wanted)
        if _is_image(ending) and found.forms[name] == "bytes" and not is_bytes | wanted.encoded:
            sizes = {_size(content, ending) for content in contents}
            found.notes += (images.kept_encoded(sizes, str(files[0])),)
    as_bytes = [name for name, form in found.forms.items() if form == "bytes"]
    ragged = [*wanted.ragged, *as_bytes]
    found.fields, found.mean_lengths = fields_of(
        list(map(found.sample, some)), ragged, str(files[0])
    )
    return found


def samples_in(path: Path, endings: dict[str, str]) -> Iterator[Files]:
    """Read the samples of an archive, of ``endings`` alone, or of all if there are none.

    Raises:
        DataError: it cannot be read.
    """
    wanted = set(endings.values())
    key = ""
    contents: dict[str, bytes] = {}
    before: set[str] = set()
    with _explained(path):
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
            if not wanted or ending in wanted:
                if key in before:
                    raise DataError(
                        f"the files of a sample lie beside each other, a .{ending} of "
                        f"{path}:{key} comes after those of others; write the archive anew with "
                        f"tar --sort=name, and give each sample a name of its own"
                    )
                claimed = num_bytes + sum(map(len, contents.values()))
                _check_file(f"{path}:{key}", ending, claimed, contents)
                contents[ending] = read()
    if contents:
        yield f"{path}:{key}", contents


def _check_file(sample: str, ending: str, claimed: int, before: dict[str, bytes]) -> None:
    if ending in before:
        raise DataError(
            f"the files of a sample have different endings, {sample} has two .{ending}; give "
            f"each sample a name of its own"
        )
    if claimed > MAX_SAMPLE_BYTES:
        raise DataError(
            f"the files of a sample have at most {format_bytes(MAX_SAMPLE_BYTES)} together, "
            f"{sample} claims {format_bytes(claimed)}; name some of its endings, "
            f"--field NAME=ENDING, or pack samples of this size by a function of yours"
        )


def _files_in(path: Path) -> Iterator[tuple[str, int, Callable[[], bytes]]]:
    """Yield name, size and reader of each file of an archive.

    Makes sure that the archive is whole and the only one, which tarfile does not.
    """
    ended = False

    class Header(tarfile.TarInfo):
        """Notices the block of zeros with which an archive ends."""

        @classmethod
        def frombuf(cls, buf: Any, encoding: str, errors: str) -> Self:
            """Read a header."""
            nonlocal ended
            ended = bool(buf) and not any(buf)
            header = super().frombuf(buf, encoding, errors)
            if header.type in _NOTES and header.size > _MAX_HEADER_BYTES:
                raise tarfile.ReadError(f"a header claims {format_bytes(header.size)}")
            return header

    with (
        _unpacked(path) as file,
        tarfile.open(fileobj=file, mode="r|", tarinfo=Header) as archive,
    ):
        for member in archive:
            if member.issym() or member.islnk():
                raise DataError(
                    f"an archive of samples holds their files themselves, {member.name} of "
                    f"{path} is a link to {member.linkname}; write it anew with tar "
                    f"--dereference --hard-dereference"
                )
            if content := archive.extractfile(member) if member.isfile() else None:
                yield member.name, member.size, content.read
        if not ended:
            raise tarfile.ReadError("its end is missing")
        _check_rest(archive.fileobj, path)


def _check_rest(stream: Any, path: Path) -> None:
    """Read what follows the end of an archive; a packed one has its checksum there."""
    at = stream.tell()
    while piece := stream.read(MIB):
        if more := piece.lstrip(b"\0"):
            raise DataError(
                f"an archive ends at a block of zeros, {path} has one before byte {at} and more "
                f"from byte {at + len(piece) - len(more)} on: it is damaged, or several in one; "
                f"fetch it again, or write it anew from what tar --ignore-zeros -xf finds in it"
            )
        at += len(piece)


class _Streams(RawIOBase):
    """Streams of bz2 or xz after each other: the library leaves out those it cannot read."""

    def __init__(self, file: IO[bytes], make: Callable[[], Any]) -> None:
        self._file, self._make = file, make
        self._stream = make()

    def readable(self) -> bool:
        """Say that it can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read at most as many bytes as fit, none at the end of the file."""
        while True:
            packed = b""
            if self._stream.eof:
                packed = self._stream.unused_data.lstrip(b"\0")
                while not packed:
                    if not (piece := self._file.read(MIB)):
                        return 0
                    packed = piece.lstrip(b"\0")
                self._stream = self._make()
            elif self._stream.needs_input and not (packed := self._file.read(MIB)):
                raise EOFError("its end is missing")
            if found := self._stream.decompress(packed, len(buffer)):
                buffer[: len(found)] = found
                return len(found)


@contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open an archive; all of it that is read agrees with the checksums of its packing."""
    with path.open("rb") as file:
        head = file.read(6)
        file.seek(0)
        unpacked: Any = file
        if head.startswith(b"\x1f\x8b"):
            unpacked = gzip.GzipFile(fileobj=file)
        elif head.startswith(b"BZh"):
            unpacked = BufferedReader(_Streams(file, bz2.BZ2Decompressor))
        elif head.startswith((b"\xfd7zXZ", b"\x5d\x00\x00\x80")):
            unpacked = BufferedReader(_Streams(file, lzma.LZMADecompressor))
        with unpacked:
            yield unpacked


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Raise what is wrong with an archive as a DataError that names it."""
    try:
        yield
    except (tarfile.TarError, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise DataError(
            f"{path} cannot be read as an archive: {reason_of(error)}; fetch it again, or take "
            f"it out of the source"
        ) from None


def _is_image(ending: str) -> bool:
    return f".{ending.rpartition('.')[2].lower()}" in images.ENDINGS


def _size(content: bytes, ending: str) -> images.Size:
    return images.size_of(BytesIO(content), f"a .{ending}")


def _form(ending: str, contents: Sequence[bytes], wanted: WantedFields) -> Form:
    last = ending.rpartition(".")[2].lower()
    if _is_image(ending) and not wanted.encoded:
        if wanted.resize:
            return "image"
        sizes = {_size(content, ending) for content in contents}
        return "image" if len(sizes) == 1 else "bytes"
    if last == "npy":
        return "array"
    if last in _ALWAYS_NUMBERS or (last in _MAYBE_NUMBERS and all(map(_is_number, contents))):
        return "number"
    return "bytes"


def _is_number(content: bytes) -> bool:
    try:
        array = np.asarray(json.loads(content))
    except ValueError:
        return False
    return array.dtype.kind in "biuf"


def _decoded(content: bytes, form: Form, what: str, resize: images.Size | None) -> Array:
    if form == "image":
        return images.pixels(content, what, resize)
    if form == "bytes":
        return images.raw(content)
    try:
        if form == "array":
            return np.asarray(np.load(BytesIO(content), allow_pickle=False))
        array = np.asarray(json.loads(content))
    except (ValueError, EOFError, MemoryError, OverflowError) as error:
        raise DataError(
            f"{what} must be {'an array of numpy' if form == 'array' else 'a number'}: {error}; "
            f"to keep it as bytes: --field NAME={what.rpartition('.')[2]}:bytes"
        ) from None
    return array
