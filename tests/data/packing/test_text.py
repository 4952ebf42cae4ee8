"""Check text packed by line, or split to one length; as bytes or as tokens."""

import numpy as np
import pytest

ONE = "Erste Zeile\r\nzweite Zeile: äöü\n\n\n  \nZweiter Absatz\nEnde"
TWO = "\nDritter Absatz"


@pytest.fixture
def books(tmp_path):
    (tmp_path / "books").mkdir()
    (tmp_path / "books/1.txt").write_bytes(ONE.encode())
    (tmp_path / "books/2.txt").write_bytes(TWO.encode())
    (tmp_path / "books/3.txt").touch()
    return tmp_path / "books"


@pytest.fixture
def tokenizer(tmp_path, monkeypatch):
    (tmp_path / "my_tokens.py").write_text(
        "import numpy as np\n"
        "def numbers(text): return np.array([ord(c) for c in text], np.uint16)\n"
        "def words(text): return [len(word) for word in text.split()]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "my_tokens"


def texts(found):
    return [bytes(text).decode() for text in found["text"]]


def test_a_sample_is_a_line(books, packed):
    done, found = packed(books)
    assert done.manifest.fields["text"].dtype == "|u1"
    lines = ["Erste Zeile", "zweite Zeile: äöü", "  ", "Zweiter Absatz", "Ende", "Dritter Absatz"]
    assert texts(found) == lines


@pytest.mark.parametrize("shuffle", [None, 0])
def test_bytes_of_one_length(books, packed, shuffle):
    done, found = packed(books, length=5, fields={"x": "text"}, shuffle=shuffle)
    expected = [
        text[start : start + 5]
        for text in (ONE.encode(), TWO.encode())
        for start in range(0, len(text) - 4, 5)
    ]
    pieces = [bytes(piece) for piece in found["x"]]
    assert sorted(pieces) == sorted(expected)
    assert (pieces == expected) == (shuffle is None)
    assert done.manifest.fields["x"].shape == (5,)


def test_tokens_by_line_or_of_one_length(books, packed, tokenizer):
    done, found = packed(books, tokenizer=f"{tokenizer}:numbers")
    assert done.manifest.fields["tokens"].dtype == "<u2"
    assert "".join(map(chr, found["tokens"][1])) == "zweite Zeile: äöü"
    _, found = packed(books, tokenizer=f"{tokenizer}:numbers", length=4)
    whole = ONE[: len(ONE) // 4 * 4] + TWO[: len(TWO) // 4 * 4]
    assert "".join(map(chr, np.concatenate(found["tokens"]))) == whole
    _, found = packed(books, tokenizer=f"{tokenizer}:words")
    assert found["tokens"][0].tolist() == [5, 5]
    assert found["tokens"][2].tolist() == []
