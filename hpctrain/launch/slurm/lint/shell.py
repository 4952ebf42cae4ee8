"""Commands and variables of a shell script, as far as they can be known without running it."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

UNKNOWN = "\ue001"  # stands in a text for what only a run would tell

MAX_DEPTH = 8  # of files that source files, and of programs in the words of programs

SHELLS = ("bash", "sh", "dash", "zsh", "ksh")

_WRAPPERS = (
    *("exec", "nohup", "command", "env", "timeout", "nice", "ionice", "stdbuf", "numactl"),
    *("time", "taskset", "builtin", "setsid"),
)
_WRAPPER_WORD = re.compile(r"-.*|\d+[smhd]?|0x\w+|\w+=.*", re.DOTALL)
HARMLESS = re.compile(r"(/activate|/etc/.*|.*/init/\w+|.*/profile\.d/.*|.*\.bashrc)$")
"""Files that set variables and start nothing."""
_WHICH = re.compile(r"\s*(?:which|command -v|type -p)\s+(\w[\w.+-]*)\s*")
_ARRAY = re.compile(r'"?\$\{(\w+)\[[@*]\]\}"?')
_OPERATORS = (":-", "-", ":=", "=", ":?", "?", ":+", "+")
_EXPANSIONS = ("simple_expansion", "expansion", "command_substitution")
_NO_WORDS = ("variable_assignment", "comment", "file_redirect", "herestring_redirect")
_PARSER = Parser(Language(tree_sitter_bash.language()))


@dataclass(frozen=True, slots=True)
class Command:
    """One simple command, behind ``timeout 60``, ``env X=1`` and their like."""

    line: int
    words: tuple[str | None, ...]
    """Expanded; None stands for any number of words that are not known."""
    environ: Mapping[str, str]  # variables set in front of it
    is_background: bool = False

    @property
    def name(self) -> str:
        """The program it runs, without its folder."""
        return base(self.words)


class ShellScript:
    """A script, read once; where two values of a variable are possible, neither is known."""

    def __init__(self, text: str, *, given: Mapping[str, str], directory: Path | None) -> None:
        """Read it, what it sources, and the programs in its traps and substitutions.

        ``given`` are variables that it finds already set. Relative names of files begin at
        ``directory``; None reads no file.
        """
        self.given = given
        self.directory = directory
        self.values: dict[str, list[str] | None] = {}
        """The words of each variable that it sets; None where they are not known."""
        self.assigned: dict[str, int] = {}
        """The last line that sets a variable for the commands behind it."""
        self.has_unread_sources = False
        found = list(self._collect(_root(text), 0, 0))
        commands = [self._command(*each) for each in found]
        self.commands = sorted(commands, key=lambda command: command.line)

    def get(self, name: str) -> str | None:
        """Return the value of a variable; None if it is not set, as far as can be seen."""
        if name in self.values:
            values = self.values[name]
            return UNKNOWN if values is None else " ".join(values)
        return self.given.get(name)

    def inner(self, text: str) -> list[Command]:
        """Return the commands of a program that stands in a word, as of ``bash -c "..."``."""
        return [self._command(*each) for each in self._collect(_root(text), 0, MAX_DEPTH)]

    def _collect(
        self, node: Node, line: int, depth: int, *, is_background: bool = False
    ) -> Iterator[tuple[Node, int, bool]]:
        """Set variables, and return each command with its line and whether it is waited for."""
        here = line + node.start_point[0] + 1
        if node.type == "variable_assignment":
            self._assign(node)
            if depth == 0:  # not of a program in the words of another
                self.assigned[_name(node)] = here
        elif node.type == "for_statement":
            self.values[_text(node.child_by_field_name("variable"))] = None
        elif node.type == "command":
            yield node, here, is_background
            yield from self._inside(node, line, depth)
        for child in node.children:
            is_own = node.type == "command" and child.type == "variable_assignment"
            if child.type != "heredoc_body" and not is_own:
                is_sent = child.next_sibling is not None and child.next_sibling.type == "&"
                yield from self._collect(
                    child, line, depth, is_background=is_background or is_sent
                )

    def _inside(self, node: Node, line: int, depth: int) -> Iterator[tuple[Node, int, bool]]:
        """Follow what a command does to variables, and the programs in its words."""
        words = _arguments(node)
        texts = [_text(word).strip("'\"") for word in words]
        if texts[:1] in (["read"], ["select"]):
            self.values.update(dict.fromkeys(texts[1:]))
        elif texts[:1] in (["source"], ["."]) and len(words) > 1:
            self._source(self._value(words[1]), depth)
        programs = [1] if texts[:1] in (["eval"], ["trap"]) else []
        for at in range(len(texts) - 2):
            is_shell = texts[at].rpartition("/")[2] in SHELLS
            programs += [at + 2] if is_shell and re.fullmatch(r"-\w*c", texts[at + 1]) else []
        for at in programs:
            if depth < MAX_DEPTH and at < len(words):
                row = words[at].start_point[0]
                yield from self._collect(_root(texts[at]), line + row, depth + 1)

    def _assign(self, node: Node) -> None:
        name, value = _name(node), node.child_by_field_name("value")
        parts = [] if value is None else [value]
        if value is not None and value.type == "array":
            parts = [child for child in value.named_children if child.type != "comment"]
        words = [word for part in parts for word in self._words(part)]
        known = [word for word in words if word is not None and UNKNOWN not in word]
        is_added = any(child.type == "+=" for child in node.children)
        given = [self.given[name]] if name in self.given else None
        before = self.values.get(name, given if is_added else [])
        is_more = is_added or re.search(rf"\${{?{name}\b", _text(value)) is not None
        is_same = name not in self.values or is_more or before == known
        is_known = len(known) == len(words) and is_same and before is not None
        self.values[name] = [*(before or () if is_added else ()), *known] if is_known else None

    def _source(self, name: str, depth: int) -> None:
        if HARMLESS.search(name):
            return
        if UNKNOWN in name or self.directory is None or depth >= MAX_DEPTH:
            self.has_unread_sources = True
            return
        try:
            text = (self.directory / Path(name).expanduser()).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError, RuntimeError):
            self.has_unread_sources = True
        else:
            list(self._collect(_root(text), 0, depth + 1))  # for its variables

    def _command(self, node: Node, line: int, is_background: bool) -> Command:  # noqa: FBT001
        words = [word for part in _arguments(node) for word in self._words(part)]
        own = {
            _name(child): self._value(child.child_by_field_name("value"))
            for child in node.children
            if child.type == "variable_assignment"
        }
        return Command(line, tuple(behind_wrappers(words)), own, is_background)

    def _words(self, node: Node) -> list[str | None]:
        """Expand a word as the shell would."""
        if array := _ARRAY.fullmatch(_text(node)):
            values = self.values.get(array[1])
            return [None] if values is None else [*values]
        value = self._value(node)
        if value == UNKNOWN:
            return [None]
        parts = node.children if node.type == "concatenation" else [node]
        return [*value.split()] if any(p.type in _EXPANSIONS for p in parts) else [value]

    def _value(self, node: Node | None) -> str:
        """Expand a text; ``UNKNOWN`` stands for the parts that cannot be known."""
        text = _text(node)
        if node is None or node.type == "raw_string":
            return text[1:-1]
        if node.type in _EXPANSIONS:
            return self._expansion(node, text)
        if node.type in ("arithmetic_expansion", "process_substitution", "ansi_c_string"):
            return UNKNOWN
        if node.named_children:
            return self._joined(node)
        inside = text[1:-1] if node.type == "string" else text
        return re.sub(r"\\(\n|.)", lambda found: found[1].strip("\n"), inside)

    def _expansion(self, node: Node, text: str) -> str:
        if node.type == "expansion":
            return self._braced(node)
        if node.type == "simple_expansion":
            value = self.get(text[1:])
            return UNKNOWN if value is None else value
        program = _WHICH.fullmatch(text.strip("$()`"))
        return program[1] if program else UNKNOWN

    def _joined(self, node: Node) -> str:
        """Join the values of a word's parts, with the blanks that stand between them."""
        whole, at, parts = node.text or b"", 0, []
        for child in node.children:
            start = child.start_byte - node.start_byte
            parts.append(whole[at:start].decode(errors="replace"))
            parts.append(self._value(child) if child.type != '"' else "")
            at = child.end_byte - node.start_byte
        return re.sub(f"{UNKNOWN}+", UNKNOWN, "".join(parts))

    def _braced(self, node: Node) -> str:
        name, *rest = node.children[1:-1] or [node]
        if name.type not in ("variable_name", "special_variable_name"):
            return UNKNOWN
        value = self.get(_text(name))
        if not rest:
            return UNKNOWN if value is None else value
        operator, *others = rest
        if operator.type not in _OPERATORS or operator.type.endswith("+"):
            return UNKNOWN
        is_set = value if operator.type.startswith(":") else value is not None
        if is_set or operator.type.endswith("?"):
            return value or UNKNOWN
        if self.has_unread_sources or _text(name).startswith("SLURM"):
            return UNKNOWN
        return "".join(map(self._value, others))


def base(words: Sequence[str | None]) -> str:
    """Return the name of the program that a command runs, without its folder."""
    return (words[0] or "").rpartition("/")[2] if words else ""


def _root(text: str) -> Node:
    return _PARSER.parse(text.encode(errors="replace")).root_node


def _text(node: Node | None) -> str:
    return (node.text or b"").decode(errors="replace") if node is not None else ""


def _name(assignment: Node) -> str:
    return re.split(r"\W", _text(assignment), maxsplit=1)[0]


def _arguments(command: Node) -> list[Node]:
    """Return the words of a command, its name first."""
    named = [child for child in command.named_children if child.type not in _NO_WORDS]
    return [child.children[0] if child.type == "command_name" else child for child in named]


def behind_wrappers(words: Sequence[str | None]) -> Sequence[str | None]:
    """Leave out ``timeout 60``, ``env X=1`` and their like in front of a command."""
    at = 0
    while base(words[at:]) in _WRAPPERS:
        at += 1
        while at < len(words) and _WRAPPER_WORD.fullmatch(words[at] or ""):
            at += 1
    return words[at:] if at < len(words) else words
