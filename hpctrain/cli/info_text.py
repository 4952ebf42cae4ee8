"""Output of ``hpctrain data info`` for people."""

from collections.abc import Iterator, Sequence

from hpctrain.core.units import format_bytes
from hpctrain.data.tools.info import Info

_MOST_SHARDS = 20
"""Listed one by one; of more only the first and the last."""


def lines_of(info: Info) -> Iterator[str]:
    """Yield the lines."""
    yield f"{info.directory}: {info.num_samples} samples of the split {info.split}"
    yield f"uuid        {info.uuid}"
    if info.created_by:
        yield f"created by  {info.created_by}"
    yield f"block size  {info.block_size} samples"
    if info.classes:
        yield f"classes     {len(info.classes)}, named in classes.txt"
    yield ""
    rows = [("field", "shape", "dtype", "compression", "bytes")]
    for field in info.fields:
        shape = ", ".join(map(str, field.shape))
        if field.mean_length is not None:
            shape = f"length{', ' * bool(shape)}{shape}; mean length {field.mean_length:.1f}"
        dtype, size = field.dtype.lstrip("|<"), format_bytes(field.num_bytes)
        rows.append((field.name, f"({shape})", dtype, field.compression or "none", size))
    yield from _columns(rows)
    yield ""
    shards = [
        (s.file, str(s.num_samples), format_bytes(s.num_bytes), s.state) for s in info.shards
    ]
    head = ("shard", "samples", "bytes", "file")
    if len(shards) > _MOST_SHARDS:
        faults = [row for row in shards[1:-1] if row[-1] != "here"]
        shards = [shards[0], *faults[:_MOST_SHARDS], ("...", "", "", ""), shards[-1]]
    yield from _columns([head, *shards])
    plural = "s" * (len(info.shards) != 1)
    yield f"{len(info.shards)} shard{plural}, {format_bytes(info.num_bytes)}"


def _columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        texts = [f"{text:{width}}" for text, width in zip(row, widths, strict=True)]
        yield "  ".join(texts).rstrip()
