from hpctrain.train.metrics import Metrics, read


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
