"""Values written as TOML; the standard library only reads it."""

import json
import re
from collections.abc import Mapping
from typing import Any

_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def dumps(value: Any) -> str:
    """Write one value on one line, so that ``tomllib`` reads the same value back.

    Raises:
        TypeError: TOML has no such value.
    """
    match value:
        case bool():
            return "true" if value else "false"
        case str():
            # TOML's basic strings have JSON's escapes, but DEL must be escaped too.
            return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        case int() | float():
            return repr(value)
        case list() | tuple():
            return f"[{', '.join(map(dumps, value))}]"
        case Mapping():
            items = (f"{_key(name)} = {dumps(item)}" for name, item in value.items())
            return f"{{ {', '.join(items)} }}" if value else "{}"
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    raise TypeError(f"TOML has no value for {value!r} of type {type(value).__name__}")


def _key(name: str) -> str:
    return name if _BARE_KEY.fullmatch(name) else dumps(name)
