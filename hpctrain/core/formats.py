"""Versions of the formats of files that hpctrain writes and reads again."""

import re
from collections.abc import Mapping
from typing import Any


def stamp(version: int, reader: str) -> dict[str, Any]:
    """Return the entries that a file needs so that ``fault_of`` can check its format version.

    ``version`` is the format version; ``reader`` is the first version of hpctrain that reads files
    with this format version.
    """
    return {"version": version, "reader": reader}


def fault_of(record: Mapping[str, Any], newest: int) -> str:
    """Return why a file with these entries cannot be read, and the remedy; empty if it can.

    ``newest`` is the newest format version that can be read. A file without a format version has
    version 1.
    """
    found = record.get("version", 1)
    if type(found) is int and 1 <= found <= newest:
        return ""
    # A file from another person may contain any text.
    reader = re.fullmatch(r"\d[\w.]{,19}", str(record.get("reader")), re.ASCII)
    needed = f"hpctrain {reader[0]} or later" if reader else "a newer hpctrain"
    return f"its format version must be at most {newest}, got {found!r:.40}; install {needed}"
