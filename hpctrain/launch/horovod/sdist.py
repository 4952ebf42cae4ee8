"""The published sources of Horovod, and the two lines that newer torch needs changed."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpctrain.core.errors import LaunchError

VERSION = "0.28.1"
SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""Of ``horovod-0.28.1.tar.gz``, the last one published."""

LINE = f"horovod=={VERSION} --hash=sha256:{SHA256}"
"""The requirement, as pip reads it from a file: any other file is refused before it is opened."""

PATCHED = ("CMakeLists.txt", "horovod/torch/CMakeLists.txt")
"""Files that name a C++ standard for what includes torch's headers."""

PUBLISHED_STANDARD = 14
USUAL_STANDARD = 20
"""What torch 2.13 needs."""

_STANDARD = re.compile(r"^[ \t]*set\(CMAKE_CXX_STANDARD (\d+)\)[ \t]*$", re.MULTILINE)
_FLAG = re.compile(r"-std=c\+\+(\d+)")


@dataclass(frozen=True, slots=True)
class Change:
    """One line of the sources that was changed."""

    file: str
    number: int
    """Of the line, from 1."""
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.file}, line {self.number}: {self.before} -> {self.after}"


def standard_of(torch: Path) -> int:
    """Return the C++ standard that extensions of the torch in this folder are compiled with.

    Args:
        torch: the folder of the package; its ``utils/cpp_extension.py`` says it.
    """
    try:
        text = (torch / "utils" / "cpp_extension.py").read_text(encoding="utf-8")
    except OSError:
        return USUAL_STANDARD
    found = [int(number) for number in _FLAG.findall(text)]
    return max(found, default=USUAL_STANDARD)


def patch(sources: Path, standard: int, files: Sequence[str] = PATCHED) -> list[Change]:
    """Make Horovod compile with another C++ standard: one line in each of two files.

    Done a second time, it changes nothing.

    Args:
        sources: the folder of the unpacked sdist.
        standard: such as 20.
        files: that name the standard, relative to ``sources``.

    Raises:
        LaunchError: a file does not read as the published one; then none is changed.
    """
    texts: dict[Path, str] = {}
    changes: list[Change] = []
    for name in files:
        text = _read(sources / name)
        found = list(_STANDARD.finditer(text))
        known = {str(PUBLISHED_STANDARD), str(standard)}
        if len(found) != 1 or found[0][1] not in known:
            lines = ", ".join(repr(each[0].strip()) for each in found) or "no such line"
            raise LaunchError(
                f"{name} of Horovod {VERSION} must have one line "
                f"set(CMAKE_CXX_STANDARD {PUBLISHED_STANDARD}), it has {lines}: these are not the "
                "published sources, and what to change in them is not known; "
                f"let pip find the sdist of {VERSION} itself"
            )
        if found[0][1] == str(standard):
            continue
        before = found[0][0]
        after = before.replace(found[0][1], str(standard))
        texts[sources / name] = text[: found[0].start()] + after + text[found[0].end() :]
        number = text.count("\n", 0, found[0].start()) + 1
        changes.append(Change(name, number, before.strip(), after.strip()))
    for path, text in texts.items():
        path.write_text(text, encoding="utf-8", newline="")
    return changes


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except OSError as error:
        raise LaunchError(
            f"the sdist of Horovod {VERSION} must hold {path.name}, it cannot be read: {error}; "
            f"let pip find the sdist of {VERSION} itself"
        ) from None
