"""Check ``hpctrain plan``: inputs from a run, output and errors."""

import json
import math

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app

MACHINE = """
nodes = 16
ranks_per_node = 2
mtbf_s = 1e6
checkpoint_s = 10

[network]
latency_s = 5e-5
bytes_per_s = 1e8
"""
GIVEN = {"--parameters": "1.5M", "--samples-per-s": "200", "--batch": "256", "--samples": "1M"}
STEP = {"event": "step", "compute_s": 0.1, "communication_s": 0.02, "input_s": 0.005}


@pytest.fixture
def ask(tmp_path):
    (tmp_path / "machine.toml").write_text(MACHINE)

    def asked(*words, **given):
        line = ["plan", *words, "--machine", str(tmp_path / "machine.toml")]
        line += [word for pair in given.items() for word in pair]
        return CliRunner().invoke(app, line)

    return asked


@pytest.fixture
def run(tmp_path):
    """Make a run of 4 ranks: 400 samples in steps of 125 ms."""
    folder = tmp_path / "run"
    folder.mkdir()
    records = [{"event": "started", "world_size": 4, "nodes": 2, "parameters": 10_000}]
    for step in range(10, 101, 10):
        records += [STEP | {"step": step, "loss": 10 / step, "samples_per_s": 3200}]
        if step % 20 == 0:
            records += [{"event": "test", "epoch": 1, "step": step, "loss": 12 / step}]
    text = "".join(json.dumps(record) + "\n" for record in records)
    (folder / "metrics.jsonl").write_text(text)
    return folder


def test_the_table_has_the_best_the_next_and_the_last_worthwhile_number_of_nodes(ask):
    result = ask(**GIVEN)
    assert result.exit_code == 0, result.output
    for text in ("node-hours", "the best on each number of nodes", "more nodes", "bound"):
        assert text in result.output
    assert "checkpoints    every" in result.output


def test_json_has_every_figure_of_the_table(ask):
    found = json.loads(ask("--json", **GIVEN).output)
    names = {"best", "next", "by_nodes", "pays_up_to_nodes", "payoffs", "reason", "control"}
    assert names == set(found)
    assert len(found["next"]) == 3
    assert found["best"]["node_hours"] == pytest.approx(
        found["best"]["nodes"] * found["best"]["seconds"] / 3600
    )
    assert found["best"]["nodes"] <= found["pays_up_to_nodes"]


def test_a_user_codec_takes_part_and_the_faster_ones_are_reported(ask):
    message = ask("--codec", "int8:1:2e-10", **GIVEN).output
    assert "codecs and local steps on 16 nodes with a batch of 256" in message
    assert "Gbit/s" in message
    found = json.loads(ask("--json", "--codec", "int8:1:2e-10", **GIVEN).output)
    assert found["best"]["codec"] == "int8:1:2e-10"
    codecs = {one["codec"] for one in found["payoffs"] if one["local_steps"] == 1}
    assert codecs == {"fp16", "bf16", "int8:1:2e-10"}
    assert "NAME:BYTES:SECONDS" in str(ask("--codec", "zip", **GIVEN).exception)


def test_a_run_supplies_model_speed_batch_and_steps_to_a_loss(ask, run):
    def samples(*words):
        best = json.loads(ask(str(run), "--json", "--max-local-steps", "1", *words).output)["best"]
        return best["steps"] * best["batch"]

    assert samples() == pytest.approx(100 * 400)
    assert samples("--target-loss", "0.3") == pytest.approx(40 * 400)  # from its tests
    alone = json.loads(ask(str(run), "--json").output)["by_nodes"][0]
    assert alone["compute_s"] == pytest.approx(400 / 2 / 1000)  # a rank takes 100 in 0.1 s
    assert ask(str(run), "--target-loss", "0.01").exit_code != 0
    assert "its lowest loss is 0.12" in str(ask(str(run), "--target-loss", "0.01").exception)


def test_two_gradient_norms_give_a_noise_scale(ask):
    words = ("--json", "--gradient-norms", "32:4.1", "256:1.3")
    scale = (4.1 - 1.3) / (1 / 32 - 1 / 256) / ((256 * 1.3 - 32 * 4.1) / 224)
    message = ask("--json", "--noise-scale", str(scale), **GIVEN).output
    assert ask(*words, **GIVEN).output == message
    assert math.isfinite(json.loads(message)["best"]["seconds"])
    assert "omit one" in str(ask(*words, "--noise-scale", "9", **GIVEN).exception)


def test_the_plan_of_a_run_uses_its_last_noise_scale(ask, run):
    file = run / "metrics.jsonl"
    given = ask(str(run), "--json", "--noise-scale", "900").output
    assert ask(str(run), "--json").output != given
    for scale in (300.0, 900.0):
        record = STEP | {"step": 100, "loss": 0.1, "samples_per_s": 3200, "noise_scale": scale}
        file.write_text(file.read_text() + json.dumps(record) + "\n")
    assert ask(str(run), "--json").output == given
    assert ask(str(run), "--json", "--noise-scale", "300").output != given


def test_missing_or_wrong_inputs_raise(ask, tmp_path):
    for name in GIVEN:
        rest = {key: value for key, value in GIVEN.items() if key != name}
        assert name in str(ask(**rest).exception)
    assert "give RUN" in str(ask("--target-loss", "1", **GIVEN).exception)
    assert "must be a run directory" in str(ask(str(tmp_path), **GIVEN).exception)
    assert ask(**GIVEN | {"--samples": "many"}).exit_code == 2
    assert "the time of the fastest candidate" in str(ask("--deadline", "1s", **GIVEN).exception)
