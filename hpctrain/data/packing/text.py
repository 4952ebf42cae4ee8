"""Text files as bytes, or as tokens of a function of the user."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from hpctrain.core.errors import DataError
from hpctrain.core.target import file_of
from hpctrain.data.packing.arrays import Arrays, joined
from hpctrain.data.packing.python import resolve
from hpctrain.data.packing.source import (
    Array,
    Indexed,
    Per,
    Sample,
    Streamed,
    WantedFields,
    field_of,
    raw,
)


@dataclass(kw_only=True)
class Texts(Streamed):
    """Lines, paragraphs or whole files, or windows of the tokens of a file."""

    name: str
    per: Per
    length: int | None
    tokenizer: str | None

    def samples(self, part: int) -> Iterator[Sample]:
        """Read the samples of a file, one by one."""
        path = self.files[part]
        for index, array in enumerate(self._arrays(path)):
            yield f"sample {index} of {path}", {self.name: array}

    def _arrays(self, path: str) -> Iterator[Array]:
        tokens_of: Callable[[bytes], Array] = raw
        if self.tokenizer:
            tokens_of = partial(_tokens, path, resolve(self.tokenizer, "--tokenizer"))
        if self.length is None:
            yield from map(tokens_of, _texts(path, self.per))
            return
        left: Array | None = None
        # Line by line, so that a file larger than memory can be packed.
        for line in _lines(path):
            tokens = tokens_of(line)
            left = tokens if left is None else np.concatenate([left, tokens])
            whole = len(left) - len(left) % self.length
            yield from left[:whole].reshape(-1, self.length)
            left = left[whole:]


def _tokens(path: str, tokenizer: Callable[[str], Any], text: bytes) -> Array:
    try:
        array = np.asarray(tokenizer(text.decode()))
    except UnicodeDecodeError as error:
        raise DataError(
            f"a tokenizer gets text in UTF-8, {path} is not: {error}; convert the file"
        ) from None
    if array.shape == (0,):
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        name = getattr(tokenizer, "__name__", "this one")
        raise DataError(
            f"a tokenizer returns whole numbers in a row, {name} returned "
            f"{array.dtype} of shape {array.shape}"
        )
    return array


def open_text(files: Sequence[str], wanted: WantedFields) -> Indexed | Texts:
    """Examine text files.

    The field is ``text``, bytes, or with a tokenizer ``tokens``, of the dtype that it returns;
    ragged, unless ``wanted.length`` cuts all samples to one length.

    Raises:
        DataError: there is no sample, or the tokenizer does not return whole numbers.
    """
    name = _name(wanted)
    if wanted.length is not None and wanted.tokenizer is None:
        windows = [_windows(file, name, wanted.length) for file in files]
        if not any(map(len, windows)):
            raise DataError(
                f"no file has as many as {wanted.length} bytes; choose a smaller --length"
            )
        return joined([one for one in windows if len(one)])
    found = Texts(
        fields={},
        files=files,
        name=name,
        per=wanted.per,
        length=wanted.length,
        tokenizer=wanted.tokenizer,
    )
    found.learn([name] if wanted.length is None else [], files[0])
    found.code = tuple(map(str, file_of(wanted.tokenizer))) if wanted.tokenizer else ()
    return found


def _windows(file: str, name: str, length: int) -> Arrays:
    """Examine the windows of the bytes of a file; what is left at its end is left out."""
    count = Path(file).stat().st_size // length
    return Arrays(
        fields={name: field_of((length,), "u1", file)},
        files=[file],
        sample_bytes=length,
        opener=partial(_open_windows, file, name, (count, length)),
        num_samples=count,
    )


def _open_windows(file: str, name: str, shape: tuple[int, int]) -> dict[str, Array]:
    return {name: np.memmap(file, np.uint8, "r", 0, shape)}


def _name(wanted: WantedFields) -> str:
    default = "tokens" if wanted.tokenizer else "text"
    for what in wanted.fields.values():
        if what != default:
            raise DataError(f"a text has the part {default!r} alone, no {what!r}")
    if len(wanted.fields) > 1:
        raise DataError(f"a text is one field, got {', '.join(wanted.fields)}")
    return next(iter(wanted.fields), default)


def _texts(path: str, per: Per) -> Iterator[bytes]:
    """Read a file in pieces; empty ones are left out."""
    if per == "file":
        yield from filter(None, [Path(path).read_bytes()])
    elif per == "line":
        yield from filter(None, (line.rstrip(b"\r\n") for line in _lines(path)))
    else:
        for is_text, lines in groupby(_lines(path), lambda line: bool(line.strip())):
            if is_text:
                yield b"".join(lines).rstrip(b"\r\n")


def _lines(path: str) -> Iterator[bytes]:
    with Path(path).open("rb") as file:
        yield from file
