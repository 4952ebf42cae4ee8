"""Files beside a data set that are no part of it."""

import re
from contextlib import suppress
from pathlib import Path

from hpctrain.core.atomic import PART
from hpctrain.data.format.alone import LOCK
from hpctrain.data.format.layout import MANIFEST, Manifest
from hpctrain.data.format.names import SHARD_FILE

_JOURNAL = re.compile(r"[\w.-]+-r\d{5,}\.journal(\.part)?")


def leftovers(directory: Path, manifest: Manifest | None) -> tuple[str, ...]:
    """Name what killed writers have left, and shards that no manifest names.

    Args:
        directory: of the data set.
        manifest: of the data set; None where there is none, then only unfinished files count,
            as the shards may be all that is left of it.
    """
    named = {shard.file for shard in manifest.shards} if manifest else set()
    with suppress(OSError):
        return tuple(
            sorted(
                path.name
                for path in directory.iterdir()
                if path.name not in named and _is_ours(path.name, any_shard=manifest is not None)
            )
        )
    return ()


def _is_ours(name: str, *, any_shard: bool) -> bool:
    if name in (MANIFEST + PART, LOCK) or _JOURNAL.fullmatch(name):
        return True
    return bool(SHARD_FILE.fullmatch(name)) and (any_shard or name.endswith(PART))
