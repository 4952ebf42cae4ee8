"""Text files as bytes, or as tokens of a function of the user."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hpctrain.core.errors import DataError
from hpctrain.data.packing.images import raw
from hpctrain.data.packing.named import file_of, resolve
from hpctrain.data.packing.sample_batches import NUM_EXAMINED, Sample, batched, fields_of
from hpctrain.data.packing.source import (
    Array,
    Batch,
    Indexed,
    Per,
    Streamed,
    WantedFields,
    field_of,
)

Cut = Callable[[bytes], Sequence[int]]


@dataclass(kw_only=True)
class Windows(Indexed):
    """Pieces of equal length of text files, as bytes; what is left of a file is left out."""

    name: str
    length: int
    counts: Sequence[int]
    """Pieces of each file."""

    def __len__(self) -> int:
        """Return the number of pieces."""
        return sum(self.counts)

    def take(self, indices: NDArray[np.int64]) -> Batch:
        """Read pieces."""
        ends = np.cumsum(self.counts)
        homes = np.searchsorted(ends, indices, side="right")
        rows = np.empty((len(indices), self.length), np.uint8)
        for home in np.unique(homes):
            here = homes == home
            count = self.counts[home]
            pieces = np.memmap(self.files[home], np.uint8, "r", 0, (count, self.length))
            rows[here] = pieces[indices[here] - (ends[home] - count)]
        return {self.name: rows}


@dataclass(kw_only=True)
class Texts(Streamed):
    """Lines, paragraphs or whole files, or pieces of the tokens of a file."""

    name: str
    per: Per
    length: int | None
    tokenizer: str | None
    _tokens_of: Cut | None = field(default=None, repr=False)

    @property
    def num_parts(self) -> int:
        """Files."""
        return len(self.files)

    def batches(self, part: int) -> Iterator[Batch]:
        """Read a file."""
        return batched(self.samples(part), self.fields)

    def samples(self, part: int) -> Iterator[Sample]:
        """Read the samples of a file, one by one."""
        path = self.files[part]
        for index, array in enumerate(self._arrays(path)):
            yield f"sample {index} of {path}", {self.name: array}

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the user's function: each process looks it up."""
        return {**self.__dict__, "_tokens_of": None}

    def _arrays(self, path: Path) -> Iterator[Array]:
        if self.length is None:
            yield from (self._array(text, path) for text in _texts(path, self.per))
            return
        left: Array | None = None
        # Line by line, so that a file larger than memory can be packed.
        for line in _lines(path):
            tokens = self._array(line, path)
            left = tokens if left is None else np.concatenate([left, tokens])
            whole = len(left) - len(left) % self.length
            yield from left[:whole].reshape(-1, self.length)
            left = left[whole:]

    def _array(self, text: bytes, path: Path) -> Array:
        if self.tokenizer is None:
            return raw(text)
        if self._tokens_of is None:
            self._tokens_of = resolve(self.tokenizer, "--tokenizer")
        try:
            tokens: Any = self._tokens_of(text.decode())  # type: ignore[arg-type]
        except UnicodeDecodeError as error:
            raise DataError(
                f"a tokenizer gets text in UTF-8, {path} is not: {error}; convert the file"
            ) from None
        array = np.asarray(tokens)
        if array.shape == (0,):
            array = array.astype(np.int64)
        if array.ndim != 1 or array.dtype.kind not in "iu":
            raise DataError(
                f"a tokenizer returns whole numbers in a row, {self.tokenizer} returned "
                f"{array.dtype} of shape {array.shape}"
            )
        return array


def open_text(files: Sequence[Path], wanted: WantedFields) -> Windows | Texts:
    """Examine text files.

    The field is ``text``, bytes, or with a tokenizer ``tokens``, of the dtype that it returns;
    ragged, unless ``wanted.length`` cuts all samples to one length.

    Raises:
        DataError: there is no sample, or the tokenizer does not return whole numbers.
    """
    name = _name(wanted)
    where = str(files[0])
    if wanted.length is not None and wanted.tokenizer is None:
        counts = [path.stat().st_size // wanted.length for path in files]
        if not sum(counts):
            raise DataError(
                f"no file has as many as {wanted.length} bytes; choose a smaller --length"
            )
        fields = {name: field_of((wanted.length,), "u1", where)}
        kept = [(path, count) for path, count in zip(files, counts, strict=True) if count]
        return Windows(
            fields=fields,
            files=[path for path, _ in kept],
            name=name,
            length=wanted.length,
            counts=[count for _, count in kept],
        )
    found = Texts(
        fields={},
        files=files,
        name=name,
        per=wanted.per,
        length=wanted.length,
        tokenizer=wanted.tokenizer,
    )
    every = chain.from_iterable(found.samples(part) for part in range(len(files)))
    some = list(islice(every, NUM_EXAMINED))
    ragged = [name] if wanted.length is None else []
    found.fields, found.mean_lengths = fields_of(some, ragged, where)
    found.code = file_of(wanted.tokenizer) if wanted.tokenizer else ()
    return found


def _name(wanted: WantedFields) -> str:
    default = "tokens" if wanted.tokenizer else "text"
    for what in wanted.fields.values():
        if what != default:
            raise DataError(f"a text has the part {default!r} alone, no {what!r}")
    if len(wanted.fields) > 1:
        raise DataError(f"a text is one field, got {', '.join(wanted.fields)}")
    return next(iter(wanted.fields), default)


def _texts(path: Path, per: Per) -> Iterator[bytes]:
    """Read a file in pieces; empty ones are left out."""
    if per == "file":
        text = path.read_bytes()
        if text:
            yield text
    elif per == "line":
        yield from filter(None, (line.rstrip(b"\r\n") for line in _lines(path)))
    else:
        lines: list[bytes] = []
        for line in _lines(path):
            if line.strip():
                lines.append(line)
            elif lines:
                yield b"".join(lines).rstrip(b"\r\n")
                lines = []
        if lines:
            yield b"".join(lines).rstrip(b"\r\n")


def _lines(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        yield from file
