"""The simple commands of a shell script, read without running it.

No shell: it knows quotes, comments, continued lines, redirections, here documents, substitutions,
arrays and functions well enough to say which commands a batch script has, and nothing about the
order in which they run.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

DOLLAR = "\ue000"
"""Stands for a dollar sign that the shell leaves alone, as in single quotes."""

_NAME = re.compile(r"[A-Za-z_]\w*(\[[^]]*\])?\+?=")
_HERE = re.compile(r"<<-?\s*(['\"]?)([\w.-]+)\1")
_REDIRECTION = re.compile(r"&>>?|<<<|[<>]>|[<>]&|>\||[<>]")
RESERVED = ("if", "then", "else", "elif", "while", "until", "do", "!", "time", "{")
"""Words of the shell in front of a command."""

_RUNS_TEXT = ("eval", "trap")
_SHELLS = ("bash", "sh", "dash", "zsh", "ksh")


@dataclass(frozen=True, slots=True)
class Word:
    """One word: quotes are gone, expansions such as ``$X`` are still there."""

    text: str
    quoted: bool = False
    """Whether an expansion in it stays one word."""


@dataclass(slots=True)
class Command:
    """One simple command: assignments in front, then words."""

    line: int
    words: list[Word] = field(default_factory=list)
    assigned: dict[str, list[Word]] = field(default_factory=dict)
    """Variables set in front of the command; alone on a line, they are the script's own."""


def commands(text: str) -> list[Command]:
    """Return the simple commands of a script, those inside substitutions and traps included."""
    reader = _Reader(text, 1)
    reader.read()
    return sorted(reader.found, key=lambda command: command.line)


class _Reader:
    """Walks through the text once; ``found`` grows."""

    def __init__(self, text: str, line: int) -> None:
        self.text = text
        self.at = 0
        self.line = line
        self.found: list[Command] = []
        self.command = Command(line)
        self.here: list[str] = []
        """Ends of here documents that begin at the next line."""

    def read(self) -> None:
        """Read to the end."""
        while self.at < len(self.text):
            self._step()
        self._end_command()

    def _step(self) -> None:
        char, rest = self.text[self.at], self.text[self.at : self.at + 2]
        if rest == "\\\n":
            self._move(2)
        elif char == "\n":
            self._end_command()
            self._move(1)
            self._skip_here_documents()
        elif char.isspace():
            self._move(1)
        elif char == "#":
            self._move(len(self.text[self.at :].partition("\n")[0]))
        elif self._in_test():
            self._add_word(self._raw_word())
        elif match := _HERE.match(self.text, self.at):
            self.here.append(match[2])
            self._move(len(match[0]))
        elif rest in ("<(", ">("):
            self._add_word(self._word())
        elif match := _REDIRECTION.match(self.text, self.at):
            self._redirect(match[0])
        elif char in ";&|()":
            self._operator()
        else:
            self._add_word(self._word())

    def _move(self, count: int) -> None:
        self.line += self.text.count("\n", self.at, self.at + count)
        self.at += count

    def _in_test(self) -> bool:
        """Say whether we stand inside ``[[ ... ]]``, where operators are words."""
        texts = [word.text for word in self.command.words]
        return "[[" in texts and "]]" not in texts

    def _raw_word(self) -> Word:
        match = re.compile(r"\]\]|\S+").match(self.text, self.at)
        assert match is not None
        self._move(len(match[0]))
        return Word(match[0])

    def _redirect(self, operator: str) -> None:
        """Leave out a redirection, its number and its target."""
        before = self.text[self.at - 1 : self.at]
        if before.isdigit() and self.command.words and self.command.words[-1].text.isdigit():
            self.command.words.pop()
        self._move(len(operator))
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self._move(1)
        if self.text[self.at : self.at + 1] not in ("", "\n", ";", "|"):
            self._word()

    def _operator(self) -> None:
        is_first = all(word.text in RESERVED for word in self.command.words)
        if self.text.startswith("((", self.at) and is_first:
            end = self.text.find("))", self.at)
            self.command.words.append(Word("(("))
            self.command.words.append(Word(self.text[self.at + 2 : end]))
            self._move((end if end > 0 else len(self.text)) + 2 - self.at)
            return
        if re.match(r"\(\s*\)", self.text[self.at :]):  # a function begins: its name is no command
            self.command = Command(self.line)
        self._end_command()
        self._move(1)

    def _end_command(self) -> None:
        command = self.command
        if command.words or command.assigned:
            self.found.append(command)
            for text in _programs(command.words):
                self._inner(text, command.line)
        self.command = Command(self.line)

    def _inner(self, text: str, line: int) -> None:
        reader = _Reader(text, line)
        reader.read()
        self.found += reader.found

    def _skip_here_documents(self) -> None:
        for end in self.here:
            while self.at < len(self.text):
                line = self.text[self.at :].partition("\n")[0]
                self._move(len(line) + 1)
                if line.strip() == end:
                    break
        self.here.clear()

    def _add_word(self, word: Word) -> None:
        command = self.command
        if not command.words and not command.assigned:
            command.line = self.line
        match = _NAME.match(word.text)
        words = [each.text for each in command.words]
        if match is None or (words and words[0] not in ("export", "declare", "local", "readonly")):
            command.words.append(word)
            return
        name, value = match[0].rstrip("=+").partition("[")[0], word.text[match.end() :]
        values = [Word(value, word.quoted)]
        if not value and self.text[self.at : self.at + 1] == "(":
            values = list(self._array())
        if "+" in match[0]:
            values = [Word(f"${{{name}}}"), *values]
        command.assigned[name] = values

    def _array(self) -> Iterator[Word]:
        """Read ``(a b c)`` behind ``name=``."""
        self._move(1)
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.text[self.at].isspace() or self.text.startswith("\\\n", self.at):
                self._move(1 + (self.text[self.at] == "\\"))
            elif self.text[self.at] == "#":
                self._move(len(self.text[self.at :].partition("\n")[0]))
            else:
                yield self._word()
        self._move(1)

    def _word(self) -> Word:
        """Read one word from here on."""
        parts: list[str] = []
        quoted = False
        while self.at < len(self.text):
            char, rest = self.text[self.at], self.text[self.at : self.at + 2]
            if rest == "\\\n":
                self._move(2)
            elif char == "\\":
                parts.append(rest[1:].replace("$", DOLLAR))
                self._move(2)
            elif char == "'":
                parts.append(self._until("'").replace("$", DOLLAR))
                quoted = True
            elif char == '"':
                parts.append(self._double())
                quoted = True
            elif char == "`" or rest in ("$(", "${", "<(", ">("):
                parts.append(self._expansion())
            elif char.isspace() or char in ";&|()<>":
                break
            else:
                parts.append(char)
                self._move(1)
        if not parts and not quoted:
            self._move(1)  # an operator where a word should be: go on behind it
        return Word("".join(parts), quoted)

    def _until(self, end: str) -> str:
        stop = self.text.find(end, self.at + 1)
        stop = len(self.text) if stop < 0 else stop
        inside = self.text[self.at + 1 : stop]
        self._move(stop + 1 - self.at)
        return inside

    def _double(self) -> str:
        """Read a text in double quotes."""
        parts: list[str] = []
        self._move(1)
        while self.at < len(self.text) and self.text[self.at] != '"':
            rest = self.text[self.at : self.at + 2]
            if rest[0] == "\\":
                parts.append("" if rest == "\\\n" else rest[1:].replace("$", DOLLAR))
                self._move(2)
            elif rest[0] == "`" or rest in ("$(", "${"):
                parts.append(self._expansion())
            else:
                parts.append(rest[0])
                self._move(1)
        self._move(1)
        return "".join(parts)

    def _expansion(self) -> str:
        """Read ``$(...)``, ``${...}`` or backticks; commands inside are found as well."""
        line = self.line
        if self.text[self.at] == "`":
            inside = self._until("`")
            self._inner(inside, line)
            return f"$({inside})"
        opening = self.text[self.at + 1]
        whole = self._balanced(opening, ")" if opening == "(" else "}")
        if opening == "(" and not whole.startswith("$(("):
            self._inner(whole[2:-1], line)
        return whole

    def _balanced(self, opening: str, closing: str) -> str:
        start = self.at
        self._move(1)
        depth = 0
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "'" and opening == "(":
                self._until("'")
                continue
            if char == "\\":
                self._move(1)
            depth += (char == opening) - (char == closing)
            self._move(1)
            if not depth:
                break
        return self.text[start : self.at]


def _programs(words: list[Word]) -> Iterator[str]:
    """Return texts among the words that are shell programs themselves."""
    texts = [word.text for word in words]
    if texts[:1] and texts[0] in _RUNS_TEXT and len(texts) > 1:
        yield texts[1].replace(DOLLAR, "$")
    for shell, flag, text in zip(texts, texts[1:], texts[2:], strict=False):
        if shell.rpartition("/")[2] in _SHELLS and re.fullmatch(r"-\w*c", flag):
            yield text.replace(DOLLAR, "$")
