import pytest

from hpctrain.train.metrics import read
from tests.train.starting import ROOT, start


@pytest.mark.launches
@pytest.mark.conformance
def test_ranks_that_agree_every_eight_steps_learn_the_digits(tmp_path):
    done = start(
        *("-m", "hpctrain", "train", ROOT / "examples/local_sgd.toml"),
        *("--set", f"data.args.folder={tmp_path}/data", "--set", f"output_dir={tmp_path}/out"),
        *("--set", "train.epochs=8", "--set", "log.plots=false"),
        num_ranks=2,
        nodes=2,
    )
    assert done.returncode == 0, done.stderr
    assert "local_sgd, steps 8, which travels as bf16" in done.stdout
    record = read(tmp_path / "out/metrics.jsonl")[-1]
    assert record["metric"] >= 0.94
    num_steps = record["step"]
    assert record["rounds"] == -(-num_steps // 8)
    gradients = 4 * record["parameters"] * num_steps
    assert record["bytes_sent"] + record["bytes_saved"] == gradients
    assert record["bytes_sent"] == pytest.approx(
        record["rounds"] * 2 * record["parameters"], rel=0.01
    )
