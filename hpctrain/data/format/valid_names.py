"""Names in a data set: of splits, of fields, and of the files of shards."""

import re
from collections.abc import Collection

from hpctrain.core.atomic import PART
from hpctrain.core.errors import DataError

PLAIN_NAME = re.compile(r"\w[\w.-]*")
SHARD_FILE = re.compile(
    r"[\w.-]+-[0-9a-f]{8}-(r\d{5,}-)?\d{5,}(-of-\d{5,})?\.h5(\.short)?(\.part)?"
)


def check_names(split: str, fields: Collection[str]) -> None:
    """Check the names that a user chooses.

    Raises:
        DataError: a name cannot be part of a file name or be an attribute of a batch.
    """
    if not PLAIN_NAME.fullmatch(split):
        raise DataError(f"a split is a word such as train, got {split!r}")
    if not fields:
        raise DataError('a data set needs at least one field, such as {"x": ((8, 8), "f4")}')
    for name in fields:
        if not name.isidentifier():
            raise DataError(f"a field has the name of a Python variable, got {name!r}")


def shard_file(split: str, uuid: str, shard: int, num_shards: int) -> str:
    """Return the name of a shard.

    The start of the uuid keeps the shards of a new data set apart from those it replaces.
    """
    return f"{split}-{uuid[:8]}-{shard:05d}-of-{num_shards:05d}.h5"


def shard_part(split: str, uuid: str, rank: int, shard: int) -> str:
    """Return the name of a shard, the ``shard``-th of ``rank``, before it has a place in all."""
    return f"{split}-{uuid[:8]}-r{rank:05d}-{shard:05d}.h5{PART}"
