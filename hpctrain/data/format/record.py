"""What every manifest in JSON must be, before its parts are looked at."""

from typing import Any

from hpctrain.core.errors import DataError

_MOST = 2**62


def check_record(record: dict[str, Any]) -> None:
    """Check that there are shards, and that every number is whole and counts something.

    Raises:
        DataError: it is not so.
    """
    if not record["shards"]:
        raise DataError("it names no shard")
    _check_numbers(record)


def _check_numbers(value: object) -> None:
    if isinstance(value, dict):
        for one in value.values():
            _check_numbers(one)
    elif isinstance(value, list):
        for one in value:
            _check_numbers(one)
    elif isinstance(value, float) or (isinstance(value, int) and not 0 <= value < _MOST):
        raise DataError(f"its numbers are whole, at least 0 and less than 2^62, got {value}")
