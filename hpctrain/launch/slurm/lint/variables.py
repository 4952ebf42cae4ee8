"""Values of the variables of a shell script, as far as they can be known without running it."""

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from hpctrain.launch.slurm.lint.shell import DOLLAR, Command, Word, commands

UNKNOWN = "\ue001"
"""Stands in a text for what only a run would tell."""

DECLARING = ("export", "declare", "local", "readonly", "typeset")
MAX_DEPTH = 8
"""Of variables made of variables, and of files that source files."""

_HARMLESS = re.compile(r"(/activate|/etc/.*|.*/init/\w+|.*/profile\.d/.*|.*\.bashrc)$")
_WHICH = re.compile(r"\s*(?:which|command -v|type -p)\s+(\w[\w.+-]*)\s*")
_PLAIN = re.compile(r"\$(\w+|.)", re.DOTALL)
_BRACED = re.compile(r"(\w+)(\[[@*\d]\])?(:?[-=?+])?(.*)", re.DOTALL)


class Variables:
    """What the variables of a script hold: where two values are possible, nothing is known."""

    def __init__(
        self,
        script: Sequence[Command],
        *,
        given: Mapping[str, str],
        directory: Path | None = None,
    ) -> None:
        """Collect the assignments of a script and of the files it sources.

        Args:
            script: its commands.
            given: variables it finds already set.
            directory: where relative names of files begin; None reads no file.
        """
        self.given = given
        self.directory = directory
        self.values: dict[str, list[str] | None] = {}
        """The words of each variable; None where they are not known."""
        self.has_unread_sources = False
        """Whether variables may be set in a file that could not be read."""
        self._collect(script, 0)

    def words(self, words: Iterable[Word]) -> list[str | None]:
        """Expand words as the shell would; None stands for any number of unknown words."""
        found: list[str | None] = []
        for word in words:
            if (array := re.fullmatch(r"\$\{(\w+)\[[@*]\]\}", word.text)) is not None:
                values = self.values.get(array[1])
                found += values if values is not None else [None]
                continue
            text = self.text(word.text)
            if text == UNKNOWN:
                found.append(None)
            elif "$" in word.text and not word.quoted:
                found += text.split()
            else:
                found.append(text)
        return found

    def text(self, text: str, depth: int = 0) -> str:
        """Expand a text; ``UNKNOWN`` stands for the parts that cannot be known."""
        parts: list[str] = []
        at = 0
        while (start := text.find("$", at)) >= 0:
            parts.append(text[at:start])
            part, at = self._expansion(text, start, depth)
            parts.append(part)
        expanded = "".join([*parts, text[at:]]).replace(DOLLAR, "$")
        return re.sub(f"{UNKNOWN}+", UNKNOWN, expanded)

    def get(self, name: str, depth: int = 0) -> str | None:
        """Return the value of a variable; None if it is not set, as far as can be seen."""
        if name in self.values:
            values = self.values[name]
            return UNKNOWN if values is None or depth > MAX_DEPTH else " ".join(values)
        return self.given.get(name)

    def _expansion(self, text: str, start: int, depth: int) -> tuple[str, int]:
        """Return the value of the expansion at ``start``, and where it ends."""
        opening = text[start + 1 : start + 2]
        if opening in ("(", "{"):
            end = _closing(text, start + 1)
            inside = text[start + 2 : end - 1]
            if opening == "{":
                return self._braced(inside, depth), end
            program = _WHICH.fullmatch(inside)
            return (program[1] if program else UNKNOWN), end
        match = _PLAIN.match(text, start)
        if match is None:  # a dollar at the end is one
            return DOLLAR, start + 1
        value = self.get(match[1], depth)
        return (UNKNOWN if value is None else value), match.end()

    def _braced(self, inside: str, depth: int) -> str:
        match = _BRACED.fullmatch(inside)
        if match is None:
            return UNKNOWN
        name, _, operator, rest = match.groups()
        value = self.get(name, depth)
        if operator is None:
            return UNKNOWN if value is None or rest else value
        if operator.endswith("+"):
            return UNKNOWN
        is_set = value if operator.startswith(":") else value is not None
        if is_set or operator.endswith("?"):
            return value or UNKNOWN
        if self.has_unread_sources or name.startswith("SLURM"):
            return UNKNOWN
        return self.text(rest, depth + 1)

    def _collect(self, script: Sequence[Command], depth: int) -> None:
        for command in script:
            first = command.words[0].text if command.words else ""
            if not first or first in DECLARING:
                for name, words in command.assigned.items():
                    self._assign(name, words)
            texts = [word.text for word in command.words]
            for known in ("for", "read", "select"):
                if known in texts:
                    rest = texts[texts.index(known) + 1 :]
                    self.values.update(dict.fromkeys(rest[: 1 if known == "for" else None]))
            for source in ("source", "."):
                if source in texts[:-1]:
                    self._source(command.words[texts.index(source) + 1], depth)

    def _assign(self, name: str, words: Sequence[Word]) -> None:
        expanded = self.words(words)
        values = [word for word in expanded if word is not None]
        known = len(values) == len(expanded) and not any(UNKNOWN in word for word in values)
        is_more = any(re.search(rf"\${{?{name}\b", word.text) for word in words)
        before = self.values.get(name, [])
        is_same = name not in self.values or is_more or before == values
        self.values[name] = values if known and is_same else None

    def _source(self, word: Word, depth: int) -> None:
        name = self.text(word.text)
        if _HARMLESS.search(name):
            return
        path = Path(name).expanduser() if UNKNOWN not in name else None
        if path is not None and self.directory is not None and depth < MAX_DEPTH:
            try:
                text = (self.directory / path).read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                self.has_unread_sources = True
            else:
                self._collect(commands(text), depth + 1)
            return
        self.has_unread_sources = True


def _closing(text: str, start: int) -> int:
    """Return the place behind the bracket that closes the one at ``start``."""
    opening = text[start]
    closing = ")" if opening == "(" else "}"
    depth = 0
    for at in range(start, len(text)):
        depth += (text[at] == opening) - (text[at] == closing)
        if not depth:
            return at + 1
    return len(text)
