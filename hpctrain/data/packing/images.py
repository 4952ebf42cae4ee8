"""Images become pixels, all of one size, or stay the bytes of their files."""

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.data.packing.source import Array, needed

ENDINGS = frozenset(
    (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
)
"""Of the files that are taken for images."""

_WIDE_MODES = ("I", "F")
"""Of Pillow: whole numbers of 16 and 32 bits, and floats."""

Size = tuple[int, int]


def size_of(file: Path | BytesIO, where: str) -> Size:
    """Return height and width of an image, of which only the head is read.

    Raises:
        DataError: it cannot be read.
    """
    with _opened(file, where) as image:
        return int(image.height), int(image.width)


def pixels(data: bytes, where: str, resize: Size | None = None) -> Array:
    """Decode an image.

    Args:
        data: of its file.
        where: its name, for errors.
        resize: height and width, by bilinear interpolation over all pixels; None keeps them.

    Returns:
        ``(height, width, 3)`` uint8, RGB.

    Raises:
        DataError: it cannot be decoded, or has more pixels than ``PIL.Image.MAX_IMAGE_PIXELS``.
    """
    pil = needed("PIL.Image", "an image")
    with _opened(BytesIO(data), where) as image:
        mode = image.mode
        most = pil.MAX_IMAGE_PIXELS
        if most is not None and image.width * image.height > most:
            raise _too_large(where, f"{image.height}x{image.width}")
        rgb = image.convert("RGB")
    if mode.startswith(_WIDE_MODES):
        # Pillow would make 255 of everything above.
        raise DataError(
            f"pixels are packed in 8 bits, {where} has more (mode {mode} of Pillow); pack it as "
            f"it is with --encoded, or as an array, from .npy files"
        )
    if resize is not None and (rgb.height, rgb.width) != resize:
        rgb = rgb.resize((resize[1], resize[0]), pil.Resampling.BILINEAR)
    return np.asarray(rgb)


@contextmanager
def _opened(file: Path | BytesIO, where: str) -> Iterator[Any]:
    pil = needed("PIL.Image", "an image")
    try:
        with pil.open(file) as image:
            yield image
    except pil.DecompressionBombError as error:
        raise _too_large(where, str(error)) from None
    except (OSError, SyntaxError, ValueError) as error:
        raise _unreadable(where, error) from None


def raw(data: bytes) -> Array:
    """Return bytes as an array ``(num_bytes,)`` uint8."""
    return np.frombuffer(data, np.uint8)


def kept_encoded(sizes: set[Size], where: str) -> str:
    """Say why images stay encoded."""
    (least, *_, most) = sorted(sizes)
    return (
        f"the images of {where} differ in size, from {least[0]}x{least[1]} to "
        f"{most[0]}x{most[1]}: they are packed as the bytes of their files; "
        f"--resize HxW packs pixels"
    )


def _too_large(where: str, found: str) -> DataError:
    most = needed("PIL.Image", "an image").MAX_IMAGE_PIXELS
    return DataError(
        f"an image that is decoded has at most {most} pixels, {where} has more ({found}): a small "
        f"file can claim any number; make it smaller, or keep it as it is: --encoded"
    )


def _unreadable(where: str, error: BaseException) -> DataError:
    return DataError(
        f"{where} cannot be read as an image: {str(error) or type(error).__name__}; "
        f"repair it, or take it out of the source"
    )
