"""Journal of a writer, kept beside the shards: the next one can go on from there."""

import json
import re
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from hpctrain.core.atomic import publishing
from hpctrain.data.format.layout import Manifest, ShardEntry, shard_of, shard_record
from hpctrain.data.format.part import number

_FORMAT = 1
_FILE = re.compile(r"-r\d{5,}\.journal(\.part)?$")


class Journal:
    """The finished shards of one rank, in a file that is replaced with each of them."""

    def __init__(self, directory: Path, draft: Manifest, rank: int, terms: dict[str, Any]) -> None:
        """Name the file; ``terms`` must be the same for a writer to go on with the shards."""
        self.path = directory / f"{draft.split}-r{rank:05d}.journal"
        self._directory = directory
        self._terms = {
            "format": _FORMAT,
            "fields": draft.fields_record(),
            "block_size": draft.block_size,
            **terms,
        }

    def uuid(self) -> str | None:
        """Return of which data set the journal is; None without one on the same terms."""
        record = self._read()
        return None if record is None else str(record["uuid"])

    def recover(self, uuid: str) -> list[ShardEntry]:
        """Return the finished shards, whose files are there, as they were before publication.

        Raises:
            OSError: the file system refuses.
        """
        record = self._read()
        if record is None or record["uuid"] != uuid:
            return []
        kept: list[ShardEntry] = []
        shards = [shard_of(one) for one in record["shards"]]
        for index, shard in enumerate(shards):
            path = self._directory / shard.file
            if record["published_as"] and not path.exists():
                with suppress(FileNotFoundError):
                    (self._directory / record["published_as"][index]).rename(path)
            if not path.exists() or path.stat().st_size != shard.num_bytes:
                break
            if record["published_as"]:
                # Killed in the middle of that: the attributes may have changed, or half of them.
                first_index = sum(before.num_samples for before in kept)
                number(path, shard, index=index, first_index=first_index)
            kept.append(shard)
        return kept

    def write(
        self, uuid: str, shards: Sequence[ShardEntry], published_as: Sequence[str] = ()
    ) -> None:
        """Replace the journal; ``published_as`` are the names that shards are about to get.

        Raises:
            OSError: the file system refuses; the former journal is still there.
        """
        record = {
            **self._terms,
            "uuid": uuid,
            "shards": [shard_record(shard) for shard in shards],
            "published_as": list(published_as),
        }
        with publishing(self.path) as part:
            part.write_text(json.dumps(record))

    def _read(self) -> dict[str, Any] | None:
        try:
            record = json.loads(self.path.read_text())
        except (FileNotFoundError, ValueError):
            return None
        terms = json.loads(json.dumps(self._terms))
        same = isinstance(record, dict) and terms.items() <= record.items()
        return record if same else None


def remove_journals(directory: Path, split: str, keep: Collection[str] = ()) -> None:
    """Remove the journals of all ranks, but for some."""
    for path in directory.glob(f"{split}-r*.journal*"):
        if _FILE.search(path.name) and path.name not in keep:
            with suppress(OSError):
                path.unlink()
