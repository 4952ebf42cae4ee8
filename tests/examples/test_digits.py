import pytest
import torch
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.train.metrics import read
from tests.train.starting import ROOT, last_line, start


@pytest.mark.launches
@pytest.mark.limit(420)
def test_four_ranks_on_two_nodes_learn_the_digits_from_shards(tmp_path):
    done = start(
        *("-m", "hpctrain", "train", ROOT / "examples/digits.toml"),
        *("--set", f"data.args.folder={tmp_path}/data", "--set", f"output_dir={tmp_path}/out"),
        *("--set", "train.epochs=8"),
        num_ranks=4,
        nodes=2,
    )
    assert done.returncode == 0, done.stderr
    record = read(tmp_path / "out/metrics.jsonl")[-1]
    assert record["event"] == "finished"
    assert record["metric"] >= 0.94
    assert (record["world_size"], record["nodes"]) == (4, 2)
    assert record["path"] == "memfd"
    assert record["rails"] >= 1
    assert last_line(done.stdout) == f"test accuracy {record['metric']:.4f}"
    for words in (["info"], ["verify"], ["export", tmp_path / "model.pt", "--only", "model"]):
        line = ["checkpoint", words[0], tmp_path / "out", *words[1:]]
        assert CliRunner().invoke(app, [*map(str, line)]).exit_code == 0
    assert torch.load(tmp_path / "model.pt", weights_only=True)
