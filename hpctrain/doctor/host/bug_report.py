"""Text to attach to a bug report: machine, packages and findings, without secrets."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions

from hpctrain.core.finding import Finding
from hpctrain.core.provenance import processor, versions

REMOVED = "[removed]"

_SECRET_NAME = re.compile("auth|cookie|cred|jwt|key|pass|private|secret|token", re.IGNORECASE)
_SECRETS = (
    re.compile(r"(?<=://)[^/\s@]+(?=@)"),  # user and password of a URL
    re.compile(r"(?<=bearer )\S+", re.IGNORECASE),
    re.compile(r"(?<=pass|oken|cret|word|_key|-key)['\"]?[=: ]+['\"]?[^\s'\"]{6,}", re.IGNORECASE),
    re.compile(r"\b(?=[a-z_]*\d)(?=[\d_]*[a-z])[a-z\d_]{20,}\b", re.IGNORECASE),
    re.compile(r"\b[a-f\d]{8}(-[a-f\d]{4}){3}-[a-f\d]{12}\b", re.IGNORECASE),
)
"""The last two are long words of letters and digits, and UUIDs, as keys of web services are."""
_MIN_LENGTH = 6  # a shorter value would match ordinary words


def bug_report(findings: Sequence[Finding], environ: Mapping[str, str] = os.environ) -> str:
    """Return versions, machine, installed packages and all findings as text.

    Environment variables, command lines and configuration files are not included, except settings
    of hpctrain and of the MPI library in the findings. Words that may be secrets are replaced.
    """
    packages = sorted({f"{each.name} {each.version}" for each in distributions()}, key=str.lower)
    lines = (
        "Report of hpctrain doctor. Words that may be secrets are removed; read it all the same.",
        "",
        *(f"{name}: {version}" for name, version in versions().items()),
        f"system: {platform.platform()}",
        f"processor: {processor()}, {os.cpu_count()} threads",
        "",
        *(
            f"{each.level:<9}{each.check}: {each.what}"
            + f"\n{'do: ':>13}{each.do}" * bool(each.do)
            for each in findings
        ),
        "",
        *packages,
    )
    return without_secrets("\n".join(lines) + "\n", environ)


def without_secrets(text: str, environ: Mapping[str, str]) -> str:
    """Return ``text`` without values of variables with secret names, and without similar words."""
    values = {value for name, value in environ.items() if _SECRET_NAME.search(name)}
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _MIN_LENGTH:
            text = text.replace(value, REMOVED)
    for pattern in _SECRETS:
        text = pattern.sub(REMOVED, text)
    return text
