"""Contents of files as values: the pixels of an image, an array, a number, or bytes."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import BytesIO
from typing import Any, Literal

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.data.packing.source import Array, WantedFields, needed, raw, readable

Form = Literal["image", "array", "number", "bytes"]
Size = tuple[int, int]
"""Height and width."""

IMAGE_ENDINGS = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)
"""Of the files that are taken for images."""

_WIDE_MODES = ("I", "F")
"""Of Pillow: whole numbers of 16 and 32 bits, and floats."""


def form_of_images(
    contents: Mapping[str, bytes], wanted: WantedFields, where: str
) -> tuple[Form, tuple[str, ...]]:
    """Decide what images become: pixels where all have, or get, one size, else bytes.

    Of ``contents``, some files by name, only the heads are read. Returns the form, and notes why
    it is not the usual one.

    Raises:
        DataError: one cannot be read.
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
        f"the images of {where} differ in size, from {least[0]}x{least[1]} to "
        f"{most[0]}x{most[1]}: they are packed as the bytes of their files; "
        f"--resize HxW packs pixels"
    )
    return "bytes", (note,)


def decoded(content: bytes, form: Form, what: str, resize: Size | None = None) -> Array:
    """Decode the content of a file; a number may be any array in JSON.

    An image becomes ``(height, width, 3)`` uint8, RGB, resized by bilinear interpolation over all
    pixels; bytes become ``(num_bytes,)`` uint8.

    Raises:
        DataError: it is not of this form, or has more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``.
    """
    if form == "bytes":
        return raw(content)
    if form == "image":
        return _pixels(content, what, resize)
    what_it_is = "an array of numpy" if form == "array" else "a number in JSON"
    errors = (ValueError, EOFError, MemoryError, OverflowError, RecursionError)
    with readable(what, f"{what_it_is}, which :bytes behind an ending keeps as it is", *errors):
        if form == "array":
            return np.asarray(np.lib.format.read_array(BytesIO(content), allow_pickle=False))
        return np.asarray(json.loads(content))


def is_number(content: bytes) -> bool:
    """Say whether a content is a number in JSON, or an array of them."""
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
        # Pillow would make 255 of everything above.
        raise DataError(
            f"pixels are packed in 8 bits, {what} has more (mode {mode} of Pillow); pack it as "
            f"it is with --encoded, or as an array, from .npy files"
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
        f"an image that is decoded has at most {most} pixels, {what} has more ({found}): a small "
        f"file can claim any number; make it smaller, or keep it as it is: --encoded"
    )
