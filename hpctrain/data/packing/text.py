"""Sources that are text files, packed as bytes or as tokens of the user's tokenizer."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.target import file_of
from hpctrain.data.packing.arrays import Opened
from hpctrain.data.packing.python import resolve
from hpctrain.data.packing.source import (
    Array,
    PackSource,
    Sample,
    WantedFields,
    field_of,
    joined,
    raw,
)


def open_text(files: Sequence[str], wanted: WantedFields) -> PackSource:
    """Return the source for text files.

    The source has one field: ``text`` with bytes or, with a tokenizer, ``tokens`` with the dtype
    that the tokenizer returns. The field is ragged unless ``wanted.length`` sets the length of a
    sample.
    """
    name = _name(wanted)
    if wanted.length is not None and wanted.tokenizer is None:
        windows = [_windows(file, name, wanted.length) for file in files]
        if not any(one.num_samples for one in windows):
            raise DataError(
                f"at least one file must have the {wanted.length} bytes of a sample, but none "
                f"has; choose a smaller --length"
            )
        return joined([one for one in windows if one.num_samples])
    found = PackSource(
        files=files, parts=[(None, partial(_read, file, name, wanted)) for file in files]
    )
    samples = chain.from_iterable(_read(file, name, wanted) for file in files)
    found.learn(samples, [name] if wanted.length is None else [], files[0])
    found.code = tuple(map(str, file_of(wanted.tokenizer))) if wanted.tokenizer else ()
    return found


def _read(path: str, name: str, wanted: WantedFields) -> Iterator[Sample]:
    for index, array in enumerate(_arrays(path, wanted)):
        yield f"sample {index} of {path}", {name: array}


def _arrays(path: str, wanted: WantedFields) -> Iterator[Array]:
    tokens_of: Callable[[bytes], Array] = raw
    if wanted.tokenizer:
        tokens_of = partial(_tokens, path, resolve(wanted.tokenizer, "--tokenizer"))
    if wanted.length is None:
        yield from map(tokens_of, filter(None, (line.rstrip(b"\r\n") for line in _lines(path))))
        return
    left: Array | None = None
    # Line by line, so that a file larger than memory can be packed.
    for line in _lines(path):
        tokens = tokens_of(line)
        left = tokens if left is None else np.concatenate([left, tokens])
        whole = len(left) - len(left) % wanted.length
        yield from left[:whole].reshape(-1, wanted.length)
        left = left[whole:]


def _tokens(path: str, tokenizer: Callable[[str], Any], text: bytes) -> Array:
    try:
        array = np.asarray(tokenizer(text.decode()))
    except UnicodeDecodeError as error:
        raise DataError(
            f"text for a tokenizer must be UTF-8, but {path} is not: {error}; convert the file"
        ) from None
    if array.shape == (0,):
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        name = getattr(tokenizer, "__name__", "this one")
        raise DataError(
            f"a tokenizer must return a list of integers, but {name} returned "
            f"{array.dtype} of shape {array.shape}"
        )
    return array


def _windows(file: str, name: str, length: int) -> PackSource:
    """Return the source for a file in samples of ``length`` bytes; a shorter rest is omitted."""
    count = Path(file).stat().st_size // length
    opened = Opened(partial(_open_windows, file, name, (count, length)))
    return PackSource(
        fields={name: field_of((length,), "u1", file)},
        runs=[(count, opened)],
        files=[file],
        sample_bytes=length,
    )


def _open_windows(file: str, name: str, shape: tuple[int, int]) -> dict[str, Array]:
    return {name: np.memmap(file, np.uint8, "r", 0, shape)}


def _name(wanted: WantedFields) -> str:
    default = "tokens" if wanted.tokenizer else "text"
    for what in wanted.fields.values():
        if what != default:
            raise DataError(
                f"--field of a text must name its only array, {default!r}, got {what!r}"
            )
    if len(wanted.fields) > 1:
        raise DataError(f"a text must be packed as one field, got {', '.join(wanted.fields)}")
    return next(iter(wanted.fields), default)


def _lines(path: str) -> Iterator[bytes]:
    with Path(path).open("rb") as file:
        yield from file
