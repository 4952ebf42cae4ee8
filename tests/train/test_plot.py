import sys

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.train.metrics import Metrics
from hpctrain.train.plot import plot_run


def write_run(path, losses, **more):
    times = {"compute_s": 0.01, "communication_s": 0.002, "input_s": 0.001}
    with Metrics(path) as metrics:
        metrics.write("started", world_size=2)
        for step, loss in enumerate(losses, 1):
            metrics.write("step", step=step, loss=loss, **times, **more)
        metrics.write("test", step=len(losses), loss=0.5, metric=0.9)


def test_a_figure_is_drawn_and_the_drift_of_replicas_has_a_panel_of_its_own(tmp_path):
    heights = []
    for name, losses, more in (
        ("plain", [2.0, float("nan"), 0.0], {}),
        ("local", [1.0], {"drift": 0.1}),
    ):
        write_run(tmp_path / f"{name}.jsonl", losses, **more)
        plot_run(tmp_path / f"{name}.jsonl", tmp_path / f"{name}.png")
        header = (tmp_path / f"{name}.png").read_bytes()[:24]
        assert header.startswith(b"\x89PNG")
        heights.append(int.from_bytes(header[20:24], "big"))
    assert heights[1] > heights[0]


def test_without_matplotlib_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ConfigError, match=r"pip install 'hpctrain\[plots\]'"):
        plot_run(tmp_path / "metrics.jsonl", tmp_path / "training.png")
