import json

import pytest

from hpctrain.train.metrics import Metrics, cut, read


def test_records_are_on_disk_as_soon_as_they_are_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    metrics.write("step", step=1, loss=0.5)
    assert read(path) == [{"event": "step", "step": 1, "loss": 0.5}]
    metrics.write("step", step=2, loss=float("inf"))
    assert read(path)[-1] == {"event": "step", "step": 2, "loss": None}
    metrics.close()


def test_a_line_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "step"}\n{"event": "st')
    assert read(path) == [{"event": "step"}]


def test_a_rank_without_a_file_writes_nothing(tmp_path):
    with Metrics(None) as metrics:
        metrics.write("step", step=1)
    assert list(tmp_path.iterdir()) == []


def line(step: int) -> bytes:
    return json.dumps({"event": "step", "step": step}).encode() + b"\n"


@pytest.mark.parametrize("damage", [bytes(9), b"\xff\xfe", b"{", b"3", b"{}", b""], ids=repr)
def test_a_line_that_is_no_record_is_named_and_left_out_alone(tmp_path, caplog, damage):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + damage + b"\n" + line(2) + line(3))
    assert [record["step"] for record in read(path)] == [1, 2, 3]
    cut(path, 4, 3)
    assert path.read_bytes() == line(1) + line(2) + line(3)
    assert f"1 of 4 lines of {path} are no records" in caplog.text
    assert ": 2; they are left out" in caplog.text


def test_zeros_in_place_of_line_breaks_keep_no_record_that_comes_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2)[:9] + b"\0" * 60 + line(3)[9:] + line(4) + line(5) + b"\0")
    cut(path, 4, 4)  # as a checkpoint after step 4 has counted them
    assert [record["step"] for record in read(path)] == [1, 4]


def test_a_whole_file_is_cut_without_a_word(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(line(1) + line(2) + line(3)[:5])
    cut(path, 1, 1)
    assert path.read_bytes() == line(1)
    assert not caplog.text
