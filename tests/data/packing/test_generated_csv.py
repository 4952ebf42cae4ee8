"""Check random CSV files with line breaks and quotes against Python's csv module."""

import csv
import random
from collections import Counter

import pytest

from hpctrain.core.errors import DataError

WORDS = ['"', "\n", "\r\n", ",", "é", " ", "NA", "it's", "00", "word", '""', "\n\n", "5"]

KINDS = {
    "text": lambda draw: "".join(draw.choices(WORDS, k=draw.choice([0, 1, 2, 3, 60]))),
    "long": lambda draw: "\n".join(draw.choices(WORDS, k=30)) * 40,
    "whole": lambda draw: str(draw.randrange(-(10 ** draw.randrange(1, 19)), 10**18)),
    "float": lambda draw: repr(draw.uniform(-1, 1) * 10 ** draw.randrange(-300, 300)),
    "zeros": lambda draw: f"{draw.randrange(10**5):05}",
}


def write(path, draw):
    """Write a file; some are larger than a block."""
    large = draw.random() < 0.3
    kinds = draw.choices(list(KINDS), k=draw.randrange(1, 5)) + ["long"] * large
    names = [f"{kind}{number}" for number, kind in enumerate(kinds)]
    with path.open("w", newline="", encoding="utf-8") as file:
        quoting = draw.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])
        end = draw.choice(["\n", "\r\n"])
        writer = csv.writer(file, quoting=quoting, lineterminator=end)
        writer.writerow(names)
        while True:
            writer.writerow([KINDS[kind](draw) for kind in kinds])
            if draw.random() < 0.02 and (not large or file.tell() > 1.1 * 2**20):
                return names


def is_same(field, value, text):
    if field.ragged:
        return bytes(value) == text.encode()
    if field.dtype == "|b1":
        return text.lower() == str(bool(value)).lower()
    return value == (int(text) if field.dtype == "<i8" else float(text))


def check(tmp_path, packed, seeds):
    outcomes = Counter()
    for seed in seeds:
        draw = random.Random(seed)
        path = tmp_path / "t.csv"
        names = write(path, draw)
        as_text = draw.random() < 0.3
        fields = {name: f"{name}:text" for name in names if "zeros" in name and as_text}
        fields |= {name: name for name in names if name not in fields}
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        try:
            done, found = packed(path, fields=fields)
        except DataError:
            outcomes["refused"] += 1
            continue
        outcomes["packed"] += 1
        for name in names:
            field = done.manifest.fields[name]
            assert len(found[name]) == len(rows), f"seed {seed}"
            for value, row in zip(found[name], rows, strict=True):
                assert is_same(field, value, row[name]), f"seed {seed}: {value}, {row[name]!r}"
            # Changed spellings are reported.
            lost = not field.ragged and any(row[name].startswith("0") for row in rows[:50])
            noted = any(f"column {name} " in note for note in done.notes)
            assert noted or not (lost and name.startswith("zeros")), f"seed {seed}"
    return outcomes


def test_a_csv_file_is_packed_as_the_csv_module_reads_it(tmp_path, packed):
    outcomes = check(tmp_path, packed, range(6))
    assert outcomes["packed"] >= 4


@pytest.mark.conformance
@pytest.mark.limit(900)
def test_many_are_packed_as_the_csv_module_reads_them(tmp_path, packed):
    outcomes = check(tmp_path, packed, range(1000, 1200))
    assert outcomes["packed"] >= 150
