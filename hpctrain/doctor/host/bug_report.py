"""Text to attach to a bug report: machine, packages and findings, without secrets."""

import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import distributions

from hpctrain.core import config
from hpctrain.core.errors import ConfigError
from hpctrain.core.finding import Finding
from hpctrain.core.provenance import processor, versions

REMOVED = "[removed]"

_SECRET_NAME = re.compile(
    r"auth|bearer|cookie|cred|dsn|jwt|key|pass|private|secret|session|signature|token|webhook"
    r"|(?:_|^)(?:pat|pw|sas)(?:_|$)|_pwd",
    re.IGNORECASE,
)
_SECRETS = (
    re.compile(r"(?<=://)[^/\s@]+(?=@)"),  # user and password of a URL
    re.compile(r"(?<=bearer )\S+|(?<=authorization: basic )\S+", re.IGNORECASE),
    re.compile(
        r"(?<=pass|oken|cret|word|ikey|_key|-key|[?&;_ ]pwd|[?&;_ ]sig)"
        r"['\"]?[=: ]+['\"]?[^\s'\"&;]{6,}",
        re.IGNORECASE,
    ),
    # Prefixes that services give to their keys, and JSON web tokens.
    re.compile(
        r"\b(?:A[KS]IA|eyJ|gh[a-z]_|github_pat_|glpat-|hf_|npm_|pypi-|sk-|xox[a-z]-)"
        r"(?=[\w.=-]*[A-Z\d])[\w.=-]{8,}"
    ),
    # Base64 of 30 bytes, which is the length of secret keys of S3.
    re.compile(r"(?<![\w/.+-])(?=\S*[a-z])(?=\S*[A-Z])(?=\S*\d)[A-Za-z\d+/]{40}(?![\w/.+-])"),
    # Long words of letters and digits, and UUIDs.
    re.compile(r"\b(?=[a-z_]*\d)(?=[\d_]*[a-z])[a-z\d_]{20,}\b", re.IGNORECASE),
    re.compile(r"\b[a-f\d]{8}(-[a-f\d]{4}){3}-[a-f\d]{12}\b", re.IGNORECASE),
)
_MIN_LENGTH = 6  # shorter values are not replaced, because they may occur in ordinary words


def bug_report(findings: Sequence[Finding], environ: Mapping[str, str] = os.environ) -> str:
    """Return versions, machine, installed packages and all findings as text.

    The text contains no command lines and no configuration files. It contains environment
    variables only as far as findings quote settings of hpctrain and of the MPI library. Words that
    may be secrets are replaced.
    """
    packages = sorted({f"{each.name} {each.version}" for each in distributions()}, key=str.lower)
    lines = (
        "Report of hpctrain doctor. Words that may be secrets are removed; check before sending.",
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
    """Replace secrets in ``text``: values of some variables, and words that look like keys.

    The variables are those whose names indicate a secret, such as ``HF_TOKEN``, and settings with
    a value that hpctrain rejects, because error messages contain such a value.
    """
    values = {
        form
        for name, value in environ.items()
        if _SECRET_NAME.search(name) or _is_rejected(name, value)
        for form in (value, repr(value)[1:-1])  # messages contain both
    }
    for value in sorted(values, key=len, reverse=True):
        if len(value) >= _MIN_LENGTH:
            text = text.replace(value, REMOVED)
    for pattern in _SECRETS:
        text = pattern.sub(REMOVED, text)
    return text


def _is_rejected(name: str, value: str) -> bool:
    """Return True if ``name`` is a setting of hpctrain and ``value`` is invalid for it."""
    try:
        config.read({name: value})
    except ConfigError:
        return True
    return False
