"""Files to pack: search below a folder, fingerprints for resuming, and decompression."""

import gzip
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path, PurePath
from typing import IO, Any, Literal, cast

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.paths import absolute
from hpctrain.data.packing.source import Array, WantedFields, needed, raw, readable

_NUM_THREADS = 16
_FILES_PER_TASK = 256


def files_below(folder: Path, skipped_links: list[str] | None = None) -> Iterator[str]:
    """Yield all files below a folder, sorted by name.

    The files in a folder precede the files in its subfolders. Links are followed, except links to
    a parent folder, which are added to ``skipped_links``. Names that begin with a dot are ignored.
    Raises ``DataError``: two paths are the same folder, a link has no target, or an entry is
    neither a file nor a folder. Raises ``OSError``: a folder cannot be read.
    """
    root = str(folder)
    seen = {_identity(str(above)): root for above in folder.resolve().parents}
    seen[_identity(root)] = root
    waiting = [root]
    while waiting:
        at = waiting.pop()
        inside = []
        with os.scandir(at) as entries:
            visible = (entry for entry in entries if not entry.name.startswith("."))
            found = sorted(visible, key=lambda entry: entry.name)
        for entry in found:
            if entry.is_dir():
                inside.append(entry.path)
                continue
            # The listing has the type of each entry, which saves a call per entry.
            if not entry.is_file():
                check_file(entry.path)
            yield entry.path
        waiting += reversed([path for path in inside if _is_new(at, path, seen, skipped_links)])


def _is_new(
    at: str, path: str, seen: dict[tuple[int, int], str], skipped_links: list[str] | None
) -> bool:
    """Record ``path``, a folder below ``at``; return False for a link to a parent folder."""
    before = seen.setdefault(_identity(path), path)
    if before == path:
        return True
    if not f"{at}/".startswith(f"{before.rstrip('/')}/"):
        raise DataError(
            f"a folder must occur once in a source, but {before} and {path} are the same folder; "
            f"remove the link"
        )
    if skipped_links is not None:
        skipped_links.append(path)
    return False


def _identity(path: str) -> tuple[int, int]:
    status = Path(path).stat()
    return status.st_dev, status.st_ino


def check_file(name: str) -> None:
    """Raise ``DataError`` unless a path is a regular file; a pipe cannot be read twice."""
    path = Path(name)
    if path.is_file():
        return
    if path.is_symlink() and not path.exists():
        raise DataError(
            f"a link among samples must lead to a file or a folder, but {path} leads to "
            f"{path.readlink()}, which is missing; restore it, or remove the link"
        )
    raise DataError(
        f"samples must be in files, but {path} is a folder, a pipe, a socket or a device; write "
        f"its content to a file, or remove it"
    )


def ending_of(text: str) -> str:
    """Return the suffix of a file name in lower case, with its dot."""
    return PurePath(text).suffix.lower()


def fingerprint(files: Iterable[str]) -> str:
    """Return a text that changes with the name, size or modification time of any of the files.

    Raises ``OSError``: a file is missing.
    """
    names = list(files)
    pieces = [names[at : at + _FILES_PER_TASK] for at in range(0, len(names), _FILES_PER_TASK)]
    # File systems of clusters have a long latency, but serve many requests concurrently.
    with ThreadPoolExecutor(_NUM_THREADS) as pool:
        digests = list(pool.map(_digest, pieces))
    return hashlib.sha256("".join(digests).encode()).hexdigest()


def _digest(names: Sequence[str]) -> str:
    digest = hashlib.sha256()
    for name in names:
        path = absolute(name)
        status = path.stat()
        line = f"{path}\0{status.st_size}\0{status.st_mtime_ns}\0"
        digest.update(line.encode(errors="surrogateescape"))
    return digest.hexdigest()


@contextmanager
def unpacked(path: str) -> Iterator[IO[bytes]]:
    """Open a file, and decompress it if it is gzip; the checksums of gzip are verified."""
    with Path(path).open("rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
        file.seek(0)
        yield cast("IO[bytes]", gzip.GzipFile(fileobj=file)) if is_packed else file


Form = Literal["image", "array", "number", "bytes"]
Size = tuple[int, int]  # height and width

IMAGE_ENDINGS = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)
"""Endings of files that are packed as images."""

_WIDE_MODES = ("I", "F")  # modes of Pillow for integers of 16 and 32 bits, and floats


def form_of_images(
    contents: Mapping[str, bytes], wanted: WantedFields, where: str
) -> tuple[Form, tuple[str, ...]]:
    """Return the form in which images are packed, ``image`` or ``bytes``, and notes for the user.

    ``contents`` maps the names of some files to their bytes; only the image headers are read.
    Raises ``DataError``: an image cannot be read.
    """
    if wanted.encoded or wanted.resize:
        return "bytes" if wanted.encoded else "image", ()
    sizes = set()
    for name, content in contents.items():
        with _opened(content, name) as image:
            sizes.add((image.height, image.width))
    if len(sizes) == 1:
        return "image", ()
    (least, *_, most) = sorted(sizes)
    note = (
        f"the images of {where} have different sizes, from {least[0]}x{least[1]} to "
        f"{most[0]}x{most[1]}, so their files are packed as bytes; pack pixels with --resize HxW"
    )
    return "bytes", (note,)


def decoded(content: bytes, form: Form, what: str, resize: Size | None = None) -> Array:
    """Decode the content of a file; the form ``number`` includes JSON arrays of numbers.

    An image becomes RGB ``(height, width, 3)`` uint8, resized by Pillow with ``BILINEAR``; bytes
    become ``(num_bytes,)`` uint8. Raises ``DataError``: the content does not have this form, or
    has more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``.
    """
    if form == "bytes":
        return raw(content)
    if form == "image":
        return _pixels(content, what, resize)
    what_it_is = "an array of numpy" if form == "array" else "a number in JSON"
    errors = (ValueError, EOFError, MemoryError, OverflowError, RecursionError)
    with readable(
        what, f"{what_it_is} (:bytes after its ending packs the file unchanged)", *errors
    ):
        if form == "array":
            return np.asarray(np.lib.format.read_array(BytesIO(content), allow_pickle=False))
        return np.asarray(json.loads(content))


def is_number(content: bytes) -> bool:
    """Return whether the content of a file is a JSON number or an array of numbers."""
    try:
        return np.asarray(json.loads(content)).dtype.kind in "biuf"
    except (ValueError, RecursionError):
        return False


def _pixels(content: bytes, what: str, resize: Size | None) -> Array:
    pil = needed("PIL.Image", "an image")
    with _opened(content, what) as image:
        mode, most = image.mode, pil.MAX_IMAGE_PIXELS
        if most is not None and image.width * image.height > most:
            raise _too_large(what, f"{image.height}x{image.width}")
        rgb = image.convert("RGB")
    if mode.startswith(_WIDE_MODES):
        # Pillow would replace all larger values by 255.
        raise DataError(
            f"pixels must have 8 bits, but {what} has more (mode {mode} of Pillow); pack the file "
            f"with --encoded, or convert the images to .npy arrays"
        )
    if resize is not None and (rgb.height, rgb.width) != resize:
        rgb = rgb.resize((resize[1], resize[0]), pil.Resampling.BILINEAR)
    return np.asarray(rgb)


@contextmanager
def _opened(content: bytes, what: str) -> Iterator[Any]:
    pil = needed("PIL.Image", "an image")
    with readable(what, "an image", OSError, SyntaxError, ValueError):
        try:
            with pil.open(BytesIO(content)) as image:
                yield image
        except pil.DecompressionBombError as error:
            raise _too_large(what, str(error)) from None


def _too_large(what: str, found: str) -> DataError:
    most = needed("PIL.Image", "an image").MAX_IMAGE_PIXELS
    return DataError(
        f"an image must have at most {most} pixels, but {what} has more ({found}); make it "
        f"smaller, or pack the file unchanged with --encoded"
    )
