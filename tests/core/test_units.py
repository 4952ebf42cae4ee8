"""Check numbers with units."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpctrain.core.errors import ConfigError
from hpctrain.core.units import (
    GIB,
    KIB,
    MAX_MESSAGES,
    MAX_RUNS,
    MIB,
    by_rank,
    format_bytes,
    format_numbers,
    format_ranks,
    format_seconds,
    parse_bytes,
    parse_number,
    parse_seconds,
    parse_size,
)

SIZES = {
    "0": 0, "17": 17, "17 B": 17, "25 MiB": 25 * MIB, "25mib": 25 * MIB, " 1.5 GiB ": 3 * GIB // 2,
    "1 kB": 1000, "2 MB": 2_000_000, "3GB": 3_000_000_000, "4 KiB": 4 * KIB,
}  # fmt: skip


@pytest.mark.parametrize("text", SIZES)
def test_sizes_are_read_with_their_units(text):
    assert parse_bytes(text) == SIZES[text]


@pytest.mark.parametrize("text", ["", "MiB", "-1", "25 Mib/s", "25 parsecs", "1e6", "0x10", "1 2"])
def test_invalid_size_is_rejected_with_an_example(text):
    with pytest.raises(ConfigError, match="25 MiB") as caught:
        parse_bytes(text)
    assert repr(text) in str(caught.value)


def test_a_number_without_a_unit_is_a_size_only_where_the_name_says_bytes():
    assert parse_size("17 B") == parse_bytes(" 17 ") == 17
    with pytest.raises(ConfigError, match=r"""25 MiB".* got ' 17 '; write "17 B" """):
        parse_size(" 17 ")


def test_numbers_are_read_with_their_factors():
    assert [parse_number(text) for text in ("10", "25.6M", "1e9", "3k")] == [10, 25.6e6, 1e9, 3e3]
    assert [parse_number(text) for text in ("7.5B", "2G", "1T")] == [7.5e9, 2e9, 1e12]
    for text in ("many", "M", "3 m", ""):
        with pytest.raises(ConfigError, match=r"25\.6M or 1e9, got"):
            parse_number(text)


@given(st.integers(0, 2**50))
def test_a_size_that_was_written_is_read_back_within_its_rounding(num_bytes):
    again = parse_bytes(format_bytes(num_bytes))
    assert abs(again - num_bytes) <= 0.05 * max(
        size for size in (1, KIB, MIB, GIB) if size <= max(num_bytes, 1)
    )


@pytest.mark.parametrize(
    ("write", "texts"),
    [
        (format_bytes, {0: "0 B", 1023: "1023 B", KIB: "1.0 KiB", 25 * MIB: "25.0 MiB"}),
        (format_bytes, {5 * GIB: "5.0 GiB"}),
        (format_seconds, {3.2e-6: "3.2 us", 1.84e-3: "1.84 ms", 2.5: "2.50 s"}),
        (format_seconds, {60: "1 min 00 s", 185: "3 min 05 s", 9000: "2.5 h"}),
        (format_numbers, {(): "", (3,): "3", (8, 0, 1): "0-1,8"}),
        (format_ranks, {(3,): "rank 3", (0, 1, 2, 5): "ranks 0-2,5"}),
    ],
)
def test_numbers_are_written_with_the_unit_that_fits(write, texts):
    assert {value: write(value) for value in texts} == texts


@given(st.sets(st.integers(0, 300)))
def test_every_number_is_in_the_text(numbers):
    read = set()
    for run in filter(None, format_numbers(numbers).split(",")):
        first, _, last = run.partition("-")
        read |= set(range(int(first), int(last or first) + 1))
    assert read == numbers


def test_a_text_about_many_ranks_is_short_and_counts_all_of_them():
    ranks = range(0, 10_000, 2)
    assert format_ranks(ranks) == f"ranks 0,2,4,6,8,10,12,14 and {5000 - MAX_RUNS} more"
    assert format_ranks(range(10_000)) == "ranks 0-9999"
    text = by_rank([f"seed {rank // 2}" if rank % 4 else None for rank in range(10_000)])
    assert text.startswith("rank 1: seed 0; ranks 2-3: seed 1; rank 5: seed 2; ")
    assert text.endswith(f" more: {5000 - MAX_MESSAGES} other messages")
    assert len(text) < 300
    assert by_rank(["a", None, "a", "b"]) == "ranks 0,2: a; rank 3: b"


DURATIONS = {
    "90 s": 90, "10min": 600, "11h50min": 11 * 3600 + 50 * 60, " 1d 12h ": 36 * 3600,
    "1.5 h": 5400, "0s": 0,
}  # fmt: skip


@pytest.mark.parametrize("text", DURATIONS)
def test_durations_are_read_with_their_units(text):
    assert parse_seconds(text) == DURATIONS[text]


@pytest.mark.parametrize("text", ["", "10", "min", "-1 s", "10 minutes", "1h30", "1 s 2"])
def test_invalid_duration_is_rejected_with_an_example(text):
    with pytest.raises(ConfigError, match=r'such as "10min", .*got'):
        parse_seconds(text)
