"""One HDF5 shard while it is written, and where its bytes lie afterwards."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np
from numpy.typing import NDArray

from hpctrain import __version__
from hpctrain.data.layout import FORMAT, VERSION, Manifest, Place, Shard
from hpctrain.files import crc32_of, sync

Rows = Mapping[str, NDArray[Any]]

_ROWS_PER_COPY = 1024
_PAGE_BYTES = 4096


class ShardPart:
    """A shard that grows to ``capacity`` samples.

    Fields are contiguous and unfiltered, so that a reader can map them. Such a field has its
    full size from the start, hence a shard that was not filled is copied by ``shortened``.
    """

    def __init__(self, path: Path, draft: Manifest, *, capacity: int, first_index: int) -> None:
        """Create the file.

        Args:
            path: of the file to write.
            draft: uuid, split, block size and fields of the data set, and the shards before.
            capacity: samples of the finished shard.
            first_index: index of its first sample in the data set.
        """
        self.path = path
        self.num_samples = 0
        self._draft = draft
        self._capacity = capacity
        self._first_index = first_index
        num_blocks = -(-capacity // draft.block_size)
        self._crcs = {name: np.zeros(num_blocks, "<u4") for name in draft.fields}
        # HDF5 1.10 must read the file, so never libver="latest"; on a page boundary, direct
        # reads that bypass the page cache are possible.
        self._file = h5py.File(
            path,
            "w",
            libver=("earliest", "v110"),
            locking=False,
            alignment_threshold=_PAGE_BYTES,
            alignment_interval=_PAGE_BYTES,
        )
        for name, field in draft.fields.items():
            shape = (capacity, *field.shape)
            self._file.create_dataset(f"data/{name}", shape, field.dtype, fill_time="never")

    @property
    def num_free(self) -> int:
        """Samples that still fit."""
        return self._capacity - self.num_samples

    def append(self, rows: Rows) -> None:
        """Add at most ``num_free`` samples, whose shapes and dtypes are those of the fields."""
        start = self.num_samples
        stop = start + len(next(iter(rows.values())))
        for name, array in rows.items():
            self._file[f"data/{name}"][start:stop] = array
            self._extend_crcs(self._crcs[name], array)
        self.num_samples = stop

    def shortened(self, path: Path) -> "ShardPart":
        """Copy what was written to a shard of just that size; this one is removed."""
        short = ShardPart(
            path, self._draft, capacity=self.num_samples, first_index=self._first_index
        )
        while short.num_free:
            some = slice(
                short.num_samples, min(short.num_samples + _ROWS_PER_COPY, self.num_samples)
            )
            short.append({name: self._file[f"data/{name}"][some] for name in self._crcs})
        self.abandon()
        return short

    def finish(self, index: int) -> Shard:
        """Complete the file, put it on disk and tell what is in it.

        Args:
            index: number of this shard in the data set.
        """
        assert not self.num_free
        for name, crcs in self._crcs.items():
            self._file.create_dataset(f"crc/{name}", data=crcs)
        self._file.attrs.update(
            format=FORMAT,
            version=VERSION,
            dataset_uuid=self._draft.uuid,
            split=self._draft.split,
            shard=index,
            n=self.num_samples,
            first_index=self._first_index,
            block_size=self._draft.block_size,
            fields=json.dumps(self._draft.fields_record()),
            created_by=f"hpctrain {__version__}, h5py {h5py.__version__}, "
            f"HDF5 {h5py.version.hdf5_version}",
            complete=1,
        )
        self._file.close()
        sync(self.path)
        return Shard(
            file=self.path.name,
            num_samples=self.num_samples,
            num_bytes=self.path.stat().st_size,
            crc32=crc32_of(self.path),
            places=self._places(),
        )

    def abandon(self) -> None:
        """Close and remove the file."""
        # Closing writes, so it can fail when the disk is full: the file must go all the same.
        try:
            self._file.close()
        finally:
            self.path.unlink(missing_ok=True)

    def _extend_crcs(self, crcs: NDArray[Any], array: NDArray[Any]) -> None:
        done = 0
        while done < len(array):
            block, inside = divmod(self.num_samples + done, self._draft.block_size)
            piece = array[done : done + self._draft.block_size - inside]
            crcs[block] = zlib.crc32(np.ascontiguousarray(piece).data, int(crcs[block]))
            done += len(piece)

    def _places(self) -> dict[str, Place]:
        with h5py.File(self.path, "r", locking=False) as file:
            num_bytes = self.path.stat().st_size
            return {
                name: Place(
                    offset=raw_offset(file[f"data/{name}"], num_bytes),
                    crc_offset=raw_offset(file[f"crc/{name}"], num_bytes),
                    crc32=zlib.crc32(crcs.data),
                )
                for name, crcs in self._crcs.items()
            }


def raw_offset(dataset: Any, file_bytes: int) -> int | None:
    """Return where the values of an HDF5 dataset lie in its file, as plain bytes.

    Returns:
        The first byte, or None where only HDF5 can read them: chunked, compact, virtual,
        filtered or external storage, another byte order, or no storage at all.
    """
    properties = dataset.id.get_create_plist()
    offset = dataset.id.get_offset()
    plain = (
        properties.get_layout() == h5py.h5d.CONTIGUOUS
        and properties.get_nfilters() == 0
        and properties.get_external_count() == 0
        and dataset.dtype.newbyteorder("<") == dataset.dtype
    )
    if not plain or offset is None or offset + dataset.nbytes > file_bytes:
        return None
    return int(offset)
