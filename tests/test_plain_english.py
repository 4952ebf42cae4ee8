"""The linter of texts finds each kind of text, and each phrase of its table."""

import pytest

from tests import plain_english
from tests.plain_english import LIMIT, Text, main, texts_of

SOURCE = '''"""Tell what it is."""

LIMIT = 3  # nobody knows, see `so many`
"""The way of the bytes; ``a card`` is code."""


def run():
    raise ValueError(f"the ranks that {LIMIT} are left go on")
'''


def test_all_kinds_of_text_are_found_with_their_lines(tmp_path):
    (tmp_path / "a.py").write_text(SOURCE)
    assert set(texts_of(tmp_path / "a.py")) == {
        Text("docstrings", 1, "Tell what it is."),
        Text("comments", 3, "# nobody knows, see `so many`"),
        Text("docstrings", 4, "The way of the bytes;  is code."),
        Text("messages", 8, "the ranks that "),
        Text("messages", 8, " are left go on"),
    }
    (tmp_path / "a.md").write_text("# Title\n\n```sh\nnobody\n```\nso many `cards`\n")
    assert [text for text in texts_of(tmp_path / "a.md") if text.words] == [
        Text("pages", 1, "# Title"),
        Text("pages", 6, "so many "),
    ]


@pytest.mark.parametrize(("num_phrases", "code"), [(LIMIT, 0), (LIMIT + 1, 1)])
def test_more_phrases_than_the_limit_are_an_error_that_names_terms(
    tmp_path, monkeypatch, capsys, num_phrases, code
):
    monkeypatch.setattr(plain_english, "ROOT", tmp_path)
    words = ["nobody"] * int(num_phrases) + ["rank"] * (1000 - int(num_phrases))
    (tmp_path / "a.md").write_text("\n".join(words))
    assert main(["a.md"]) == code
    assert ("a.md:1: 'nobody', write: no rank" in capsys.readouterr().out) == bool(code)
