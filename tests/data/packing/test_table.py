"""Check columns of tables: numbers unchanged, texts and lists as ragged fields."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hpctrain.core.errors import DataError

N = 50
COLUMNS = {
    "a": pa.array(range(N), pa.int32()),
    "flag": pa.array([i % 2 == 0 for i in range(N)]),
    "text": pa.array(["é" * i for i in range(N)]),
    "data": pa.array([bytes(range(i)) for i in range(N)]),
    "kind": pa.array(["cat", "dog"] * (N // 2)).dictionary_encode(),
    "tokens": pa.array([list(range(i)) for i in range(N)], pa.list_(pa.int16())),
    "matrix": pa.array(
        [[[i, 1.5], [2.5, 3.5]] for i in range(N)], pa.list_(pa.list_(pa.float32(), 2), 2)
    ),
}


def test_each_column_of_parquet_is_a_field(tmp_path, packed):
    table = pa.table(COLUMNS)
    pq.write_table(table.slice(0, 30), tmp_path / "0.parquet", row_group_size=7)
    pq.write_table(table.slice(30), tmp_path / "1.parquet")
    done, found = packed(tmp_path)
    for name, column in COLUMNS.items():
        wanted = column.to_pylist()
        if name in ("text", "kind"):
            wanted = [text.encode() for text in wanted]
        for value, one in zip(found[name], wanted, strict=True):
            assert bytes(value) == one if isinstance(one, bytes) else np.array_equal(value, one)
    fields = done.manifest.fields
    dtypes = [fields[name].dtype for name in ("a", "tokens", "flag", "matrix")]
    assert dtypes == ["<i4", "<i2", "|b1", "<f4"]
    assert [name for name in fields if fields[name].ragged] == ["text", "data", "kind", "tokens"]


def test_columns_of_csv_get_names_of_fields(tmp_path, packed):
    lines = [f'{i},{i / 4},{-i},"text, {i}"' for i in range(N)]
    (tmp_path / "t.csv").write_text("\n".join(["id,width,height size,note", *lines]))
    _, found = packed(tmp_path / "t.csv")
    assert list(found) == ["id", "width", "height_size", "note"]
    assert np.array_equal(found["width"], np.arange(N) / 4)
    assert bytes(found["note"][3]) == b"text, 3"


NO_NUMBERS = ["0\n1", "5\n", "1_000", "1,000", "٣", "²", "yes", "2020-01-01", "1e400", "-1e999 "]
NO_NUMBERS += ["0x10", "nan(1)", f"{2**64 - 1}", f"+{2**53 + 1}"]


@pytest.mark.parametrize("text", NO_NUMBERS)
def test_text_that_resembles_a_number_stays_text(tmp_path, packed, text):
    (tmp_path / "t.csv").write_text(f'a\n"{text}"\n')
    _, found = packed(tmp_path / "t.csv")
    assert [bytes(one).decode() for one in found["a"]] == [text]


MIXED = ["1 0 true", "True 0", "1 0 yes", f"0.5 {2**53 + 1}", "1 2020-01-01"]


@pytest.mark.parametrize("texts", MIXED)
def test_a_column_whose_values_are_not_of_one_type_is_text(tmp_path, packed, texts):
    (tmp_path / "t.csv").write_text("\n".join(["a", *texts.split()]))
    _, found = packed(tmp_path / "t.csv")
    assert [bytes(one).decode() for one in found["a"]] == texts.split()


def test_booleans_are_packed_as_words_or_as_numbers_on_request(tmp_path, packed):
    (tmp_path / "t.csv").write_text("a,b,c\ntrue,1,1\nFalse,0,0\n")
    done, found = packed(tmp_path / "t.csv", fields={"a": "a", "b": "b", "c": "c:b1"})
    assert [field.dtype for field in done.manifest.fields.values()] == ["|b1", "<i8", "|b1"]
    assert list(found["a"]) == list(found["c"]) == [True, False]


def test_nan_in_a_csv_column_is_packed_as_a_number(tmp_path, packed):
    (tmp_path / "t.csv").write_text("a,b\n1, nan\n2,0.5\n")
    assert np.array_equal(packed(tmp_path / "t.csv")[1]["b"], [np.nan, 0.5], equal_nan=True)


@pytest.mark.parametrize("name", ["t.csv", "t.tsv"])
@pytest.mark.parametrize("names", [["a"], ["a", "b"], ["a", "b", "c"]])
@pytest.mark.parametrize("end", ["", "\n", "\r", "\r\n"])
def test_rows_are_packed_however_the_last_one_ends(tmp_path, packed, name, names, end):
    between = "\t" if name == "t.tsv" else ","
    lines = [between.join(names), *(between.join([f'"{one}"', *names[1:]]) for one in "uvw")]
    (tmp_path / name).write_bytes((end or "\n").join(lines).encode() + end.encode())
    _, found = packed(tmp_path / name)
    assert [bytes(text) for text in found["a"]] == [b"u", b"v", b"w"]
    assert list(found) == names


def test_a_column_of_csv_stays_as_it_is_written(tmp_path, packed):
    (tmp_path / "t.csv").write_text("id,when\n00123,2020-01-01\n7,2021-01-01\n")
    done, found = packed(tmp_path / "t.csv", fields={"id": "id", "when": "when:text"})
    assert list(found["id"]) == [123, 7]
    assert [bytes(text) for text in found["when"]] == [b"2020-01-01", b"2021-01-01"]
    assert "such as 00123, packed as 123; to keep their text" in done.notes[0]
    assert "--field id=id:text" in done.notes[0]
    done, found = packed(tmp_path / "t.csv", fields={"id": "id:text"})
    assert [bytes(text) for text in found["id"]] == [b"00123", b"7"]
    assert done.notes == ()


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("1,2\n3,4\n5,6\n", "the first line of {}, 1, 2, is read as names of columns"),
        ("a;b\n1;2\n", "{} has one column, 'a;b', because values must be separated by commas"),
    ],
)
def test_a_first_line_without_column_names_is_reported(tmp_path, packed, text, note):
    path = tmp_path / "t.csv"
    path.write_text(text)
    done, _ = packed(path)
    assert any(note.format(path) in one for one in done.notes)


def test_numbers_get_the_requested_type(tmp_path, packed):
    (tmp_path / "t.csv").write_text("a,b,c,d\n0.1,2,18446744073709551615,255\n0.5,3,1,0\n")
    done, found = packed(tmp_path / "t.csv", fields={"x": "a,b:f4", "c": "c:u8", "d": "d:u1"})
    assert [field.dtype for field in done.manifest.fields.values()] == ["<f4", "<u8", "|u1"]
    assert np.array_equal(found["x"], np.array([[0.1, 2], [0.5, 3]], "f4"))
    assert list(found["c"]) == [2**64 - 1, 1]
    assert list(found["d"]) == [255, 0]
    done, _ = packed(tmp_path / "t.csv", fields={"x": "a,b"})
    assert "to store float32: --field x=a,b:f4" in done.notes[-1]
    pq.write_table(pa.table({"a": [[1, 2], [3]], "b": ["x", "y"]}), tmp_path / "t.parquet")
    done, found = packed(tmp_path / "t.parquet", fields={"a": "a:f4"})
    assert [row.tolist() for row in found["a"]] == [[1, 2], [3]]
    assert done.manifest.fields["a"].dtype == "<f4"


def test_the_remedy_for_a_column_of_another_type_keeps_all_columns(tmp_path, packed):
    (tmp_path / "t.csv").write_text("float,my class,text\n1,3,x\n2,4,y\nNaN,5,z\n")
    with pytest.raises(DataError, match="has 'NaN', which i8 cannot represent") as caught:
        packed(tmp_path / "t.csv")
    message = str(caught.value)
    rest = "--field my_class='my class' --field text=text"
    assert f"pack floats: --field float=float:f8 {rest}, or keep" in message
    assert message.endswith(f"keep its text: --field float=float:text {rest}")
    fields = {"float": "float:f8", "my_class": "my class", "text": "text"}
    _, found = packed(tmp_path / "t.csv", fields=fields)
    assert np.array_equal(found["float"], [1, 2, np.nan], equal_nan=True)
    assert list(found) == [*fields]
    assert [bytes(text) for text in found["text"]] == [b"x", b"y", b"z"]


def test_leading_zeros_are_kept_or_reported_in_any_row(tmp_path, packed):
    """The first rows are the first MiB of the first file."""
    (tmp_path / "0.csv").write_text("id\n" + "90210\n" * 200_000 + " 007\n")
    (tmp_path / "t").mkdir()
    (tmp_path / "t/0.csv").write_text("id\n90210\n")
    (tmp_path / "t/1.csv").write_text("id\n007\n")
    for source in (tmp_path / "0.csv", tmp_path / "t"):
        with pytest.raises(DataError, match=r"007' further on, .*=id:text, or .*=id:i8"):
            packed(source)
    _, found = packed(tmp_path / "t", fields={"id": "id:text"})
    assert [bytes(text) for text in found["id"]] == [b"90210", b"007"]
    done, found = packed(tmp_path / "t", fields={"id": "id:i8"})
    assert list(found["id"]) == [90210, 7]
    assert done.notes == ()
