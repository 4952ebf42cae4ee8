"""Columns of tables become fields: numbers as they are, texts and lists as ragged fields."""

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


def check(found, order=range(N)):
    assert np.array_equal(found["a"], list(order))
    assert np.array_equal(found["flag"], [i % 2 == 0 for i in order])
    assert [bytes(text).decode() for text in found["text"]] == ["é" * i for i in order]
    assert [bytes(data) for data in found["data"]] == [bytes(range(i)) for i in order]
    assert [bytes(kind) for kind in found["kind"]] == [[b"cat", b"dog"][i % 2] for i in order]
    assert [row.tolist() for row in found["tokens"]] == [list(range(i)) for i in order]
    assert np.array_equal(found["matrix"], [[[i, 1.5], [2.5, 3.5]] for i in order])


def test_each_column_of_parquet_is_a_field(tmp_path, packed):
    table = pa.table(COLUMNS)
    pq.write_table(table.slice(0, 30), tmp_path / "0.parquet", row_group_size=7)
    pq.write_table(table.slice(30), tmp_path / "1.parquet")
    done, found = packed(tmp_path)
    check(found)
    fields = done.manifest.fields
    assert (fields["a"].dtype, fields["tokens"].dtype, fields["flag"].dtype) == (
        "<i4",
        "<i2",
        "|b1",
    )
    assert [name for name in fields if fields[name].ragged] == ["text", "data", "kind", "tokens"]


def test_columns_of_csv_side_by_side(tmp_path, packed):
    lines = [f'{i},{i / 4},{-i},"text, {i}"' for i in range(N)]
    (tmp_path / "t.csv").write_text("\n".join(["id,width,height size,note", *lines]))
    _, found = packed(tmp_path / "t.csv")
    assert list(found) == ["id", "width", "height_size", "note"]
    assert np.array_equal(found["width"], np.arange(N) / 4)
    assert bytes(found["note"][3]) == b"text, 3"
    _, found = packed(tmp_path / "t.csv", fields={"x": "width,height size", "y": "id"})
    assert np.array_equal(found["x"], [[i / 4, -i] for i in range(N)])
    assert np.array_equal(found["y"], np.arange(N))
    with pytest.raises(DataError, match="one number a row, column note"):
        packed(tmp_path / "t.csv", fields={"x": "width,note"})


def test_tabs_and_several_files_of_the_types_of_the_first(tmp_path, packed):
    (tmp_path / "0.tsv").write_text("a\tb\n1\t2.5\n")
    (tmp_path / "1.tsv").write_text("a\tb\n2\t3\n")
    _, found = packed(f"{tmp_path}/*.tsv")
    assert np.array_equal(found["a"], [1, 2])
    assert np.array_equal(found["b"], [2.5, 3.0])
    (tmp_path / "1.tsv").write_text("a\tb\nx\t3\n")
    with pytest.raises(DataError, match=r"1.tsv cannot be read"):
        packed(f"{tmp_path}/*.tsv")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ('a,b\n1,"x\n2,y\n', 2),
        ('a,b\n1,"x"\n2,"y""\n', 3),
        ('a,b\r\n1,"x\r\ny"\r\n2,z"z\r\n3,"z\r\n4,z', 5),
        ('a\n"x\ny\n', 2),
        ('a,"b\n1,2\n', 1),
        ('a,b\n1,2\n1,"', 3),
        ("a,b\n" + "1,z\n" * 300_000 + '1,"\n1,z\n', 300_002),
    ],
)
def test_a_quote_that_is_never_closed_is_told(tmp_path, packed, text, line):
    (tmp_path / "t.csv").write_bytes(text.encode())
    with pytest.raises(
        DataError, match=rf"the row of line {line} of .*t.csv is not so .*close the quote"
    ):
        packed(tmp_path / "t.csv")


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


def test_a_row_beyond_a_mebibyte_is_told(tmp_path, packed):
    long = "x" * 3 * 2**20
    (tmp_path / "t.csv").write_text(f'a,b\n1,z\n2,"{long}"\n')
    with pytest.raises(
        DataError, match=r"at most 1.0 MiB: the row of line 3 of .*t.csv is not so"
    ):
        packed(tmp_path / "t.csv")
    (tmp_path / "t.csv").write_text(f'a,b\n1,z\n2,"{long}\n')
    with pytest.raises(DataError, match=r"the row of line 3 of .*t.csv is not so"):
        packed(tmp_path / "t.csv")


def test_rows_of_another_number_of_columns_are_told(tmp_path, packed):
    for row in ("1,2,", ",,,,", "1"):
        (tmp_path / "t.csv").write_text(f"a,b\n1,2\n{row}\n3,4\n")
        with pytest.raises(DataError, match=r"of line 3 of .*t.csv, which cannot be read, has"):
            packed(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("column", "words"),
    [
        (pa.array([1, None]), "lacks 1 of 2"),
        (pa.array([1, 2], pa.timestamp("s")), "timestamp"),
        (pa.array([[1], [None]]), "with gaps"),
    ],
)
def test_what_cannot_be_packed_is_told(tmp_path, packed, column, words):
    pq.write_table(pa.table({"odd": column, "good": pa.array([1, 2])}), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=words) as caught:
        packed(tmp_path / "t.parquet")
    assert "column odd" in str(caught.value)
    _, found = packed(tmp_path / "t.parquet", fields={"good": "good"})
    assert np.array_equal(found["good"], [1, 2])


def test_columns_that_are_not_there_and_empty_tables_are_told(tmp_path, packed):
    (tmp_path / "t.csv").write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match="has a, b, but no 'c'"):
        packed(tmp_path / "t.csv", fields={"x": "a,c"})
    (tmp_path / "t.csv").write_text("a,b\n")
    with pytest.raises(DataError, match="has no rows"):
        packed(tmp_path / "t.csv")
    (tmp_path / "t.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read as a table"):
        packed(tmp_path / "t.parquet")


def test_a_file_without_a_column_of_the_first_is_told(tmp_path, packed):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "0.parquet")
    pq.write_table(pa.table({"b": [1]}), tmp_path / "1.parquet")
    with pytest.raises(DataError, match=r"1.parquet cannot be read as the table it was at first"):
        packed(f"{tmp_path}/*.parquet")


def test_a_column_of_csv_stays_as_it_is_written(tmp_path, packed):
    (tmp_path / "t.csv").write_text("id,when\n00123,2020-01-01\n7,2021-01-01\n")
    done, found = packed(tmp_path / "t.csv", fields={"id": "id", "when": "when:text"})
    assert list(found["id"]) == [123, 7]
    assert [bytes(text) for text in found["when"]] == [b"2020-01-01", b"2021-01-01"]
    assert "such as 00123, packed as 123; to keep them" in done.notes[0]
    assert "--field id=id:text" in done.notes[0]
    done, found = packed(tmp_path / "t.csv", fields={"id": "id:text"})
    assert [bytes(text) for text in found["id"]] == [b"00123", b"7"]
    assert done.notes == ()


def test_numbers_get_the_type_that_is_asked_for(tmp_path, packed):
    (tmp_path / "t.csv").write_text("a,b,c,d\n0.1,2,18446744073709551615,255\n0.5,3,1,0\n")
    done, found = packed(tmp_path / "t.csv", fields={"x": "a,b:f4", "c": "c:u8", "d": "d:u1"})
    assert [field.dtype for field in done.manifest.fields.values()] == ["<f4", "<u8", "|u1"]
    assert np.array_equal(found["x"], np.array([[0.1, 2], [0.5, 3]], "f4"))
    assert list(found["c"]) == [2**64 - 1, 1]
    assert list(found["d"]) == [255, 0]
    done, _ = packed(tmp_path / "t.csv", fields={"x": "a,b"})
    assert "in 4 bytes: --field x=a,b:f4" in done.notes[-1]
    pq.write_table(pa.table({"a": [[1, 2], [3]], "b": ["x", "y"]}), tmp_path / "t.parquet")
    done, found = packed(tmp_path / "t.parquet", fields={"a": "a:f4"})
    assert [row.tolist() for row in found["a"]] == [[1, 2], [3]]
    assert done.manifest.fields["a"].dtype == "<f4"


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("a:i1", "value '300'|holds 300"),
        ("f:i4", "value '0.5'|holds 0.5"),
        ("f:f2", "holds 100000.0, which f2 cannot hold"),
        ("t:f4", "numbers have a type such as f4"),
        ("a,f", "changes whole numbers of column a"),
        ("a:f16", "but no 'a:f16'"),
    ],
)
def test_a_type_that_loses_something_is_told(tmp_path, packed, what, words):
    (tmp_path / "t.csv").write_text(f"a,f,t\n300,0.5,x\n{2**53 + 1},1e5,y\n")
    with pytest.raises(DataError, match=words):
        packed(tmp_path / "t.csv", fields={"x": what})


def test_columns_of_one_name_are_told(tmp_path, packed):
    (tmp_path / "t.csv").write_text("a,a\n1,2\n")
    with pytest.raises(DataError, match="has 2 named a"):
        packed(tmp_path / "t.csv", fields={"x": "a"})
