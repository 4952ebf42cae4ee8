"""Lint the texts of the project: list each phrase for which a standard term exists.

    python -m tests.plain_english [FOLDER ...]

Docstrings, comments and strings of at least four words of Python files, and the prose of Markdown
files, are searched. Some phrases have honest uses, so ``LIMIT`` per 1,000 words of each kind of
text are allowed. Above that, every phrase found is printed and the exit code is 1.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDERS = (
    "hpctrain",
    "tests",
    "examples",
    "perf",
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "SUPPORT.md",
)
LIMIT = 3.0

TERMS = {
    r"tells?|told|telling": "report, log, return, pass",
    r"says? (?:whether|what|how|which|who|where|when|so)": "return, report",
    r"go(?:es|ing)? on|went on": "continue, resume",
    r"goes along|go along": "is transferred",
    r"nobody|somebody|no one": "no rank, a rank; or the passive",
    r"who (?:has|have|is|are|may|waits?|wants?|knows?|calls?|reads?|dies|died)": "the rank that",
    r"those (?:that|who|of)": "the ranks that, the ones",
    r"what (?:is|was|has|does|it|they|all|a|an|takes|comes|lies|moves|stands|others)": "the noun",
    r"(?:lies?|lay) (?:in|on|at|with|there|beside|behind)": "is stored in, resides in",
    r"stands? (?:in|at|for|there|once|where|beside)|stood": "is, is defined",
    r"comes? (?:to|from|of|with|by|before|after|back|again|in|first)|came": "arrives, results",
    r"travels?|travelled|under way|on (?:its|their) way": "is sent, in flight",
    r"behind (?:it|them|that|this|a|an|the|each)": "after",
    r"besides?": "in addition, next to, concurrently",
    r"meets?|met(?! the)": "synchronizes, matches",
    r"parted|parts? (?:in|with|by|from|again)": "diverges",
    r"alike": "identically, equal",
    r"anew": "again; rebuild",
    r"so (?:much|many)": "the number, that many",
    r"(?:is|are|was|were) left": "remains, survives",
    r"forgets?|forgot(?:ten)?": "resets, clears",
    r"whole numbers?": "integer",
    r"for people": "human-readable",
    r"wish(?:es)?": "request",
    r"looks? (?:at|for|up|whether)|looked (?:at|for)": "check, inspect, search",
    r"cards?": "GPU, network adapter",
    r"by hand": "manually",
    r"of (?:its|their|one's) own|of yours": "own, separate",
    r"as (?:it is|it was|they are)": "unchanged",
    r"of today": "current",
    r"to the bit|bit for bit": "bitwise",
    r"in silence": "silently",
    r"mend(?:s|ed)?": "fix",
    r"ways?": "path, method, option",
    r"(?:may|can) be had": "is available",
    r"pays?": "is faster, is worthwhile",
    r"in turns?": "alternately",
    r"shall": "must, will",
}
"""Phrases without word boundaries, and the terms to write."""

_TERMS = {re.compile(rf"\b(?:{phrase})\b", re.IGNORECASE): term for phrase, term in TERMS.items()}
_CODE = re.compile(r"``.*?``|`[^`]*`", re.DOTALL)
_BLOCK = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)


class Text(NamedTuple):
    """A text of a file."""

    kind: str
    line: int
    words: str


def texts_of(path: Path) -> Iterator[Text]:
    """Yield the texts of a Python or Markdown file."""
    source = path.read_text("utf-8")
    if path.suffix == ".md":
        prose = _BLOCK.sub(lambda block: "\n" * block[0].count("\n"), source)
        for number, line in enumerate(prose.splitlines(), 1):
            yield Text("pages", number, _CODE.sub("", line))
        return
    yield from _strings_of(ast.parse(source))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not token.string.startswith("# noqa"):
            yield Text("comments", token.start[0], token.string)


def _strings_of(tree: ast.Module) -> Iterator[Text]:
    statements = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) in statements:
                yield Text("docstrings", node.lineno, _CODE.sub("", node.value))
            elif node.value.count(" ") > 2:
                yield Text("messages", node.lineno, node.value)


def main(folders: list[str]) -> int:
    """Print the phrases to rewrite; return the exit code."""
    num_words, found = Counter[str](), Counter[str]()
    lines = []
    for folder in map(ROOT.joinpath, folders or FOLDERS):
        for path in sorted(folder.rglob("*")) if folder.is_dir() else [folder]:
            if path.suffix not in (".py", ".md") or path == Path(__file__):
                continue
            for kind, line, text in texts_of(path):
                num_words[kind] += len(text.split())
                for pattern, term in _TERMS.items():
                    for match in pattern.finditer(text):
                        found[kind] += 1
                        where = f"{path.relative_to(ROOT)}:{line}"
                        lines.append(f"{where}: {match[0]!r}, write: {term}")
    rates = {kind: 1000 * found[kind] / num for kind, num in num_words.items() if num}
    sys.stdout.write("".join(f"{kind}: {rate:.1f} per 1,000\n" for kind, rate in rates.items()))
    if max(rates.values(), default=0) <= LIMIT:
        return 0
    sys.stdout.write("\n".join([*lines, f"at most {LIMIT:g} per 1,000 are allowed\n"]))
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
