import importlib.util

import pytest
import torch

from hpctrain.data.reader import ShardedDataset
from hpctrain.train.metrics import read
from tests.train.starting import ROOT, last_line, start


@pytest.fixture(scope="module")
def text():
    spec = importlib.util.spec_from_file_location("text_example", ROOT / "examples/text.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.launches
@pytest.mark.conformance
def test_two_ranks_learn_text_that_they_have_not_seen(tmp_path):
    """Fewer windows than the example has: 80 steps of 16."""
    done = start(
        *("-m", "hpctrain", "train", ROOT / "examples/text.toml"),
        *("--set", f"data.args.folder={tmp_path}/data", "--set", f"output_dir={tmp_path}/out"),
        *("--set", "data.args.num_windows=1280", "--set", "data.args.num_test=64"),
        *("--set", "train.global_batch=16", "--set", "log.plots=false"),
        num_ranks=2,
    )
    assert done.returncode == 0, done.stderr
    record = read(tmp_path / "out/metrics.jsonl")[-1]
    assert record["event"] == "finished"
    assert record["num_samples"] == 64
    assert record["metric"] <= 4.5  # 8 without any knowledge, 4.54 by how often a byte occurs
    assert record["metric"] == pytest.approx(record["loss"])
    assert last_line(done.stdout) == f"test bits_per_byte {record['metric']:.4f}"
    train, test = (ShardedDataset(tmp_path / "data" / split) for split in ("train", "test"))
    assert (len(train), len(test)) == (1280, 64)


def test_no_byte_is_guessed_from_itself_or_from_later_ones(text):
    torch.manual_seed(0)
    network = text.model(width=16, depth=2, num_heads=2).eval()
    windows = torch.randint(0, 256, (1, text.CONTEXT + 1), dtype=torch.uint8)
    other = windows.clone()
    other[0, 70:] ^= 255
    with torch.no_grad():
        scores, changed = network(windows), network(other)
    # Scores number k are those of byte k + 1.
    assert torch.equal(scores[0, :70], changed[0, :70])
    assert not torch.isclose(scores[0, 70:], changed[0, 70:]).all(dim=1).any()


def test_knowing_nothing_costs_eight_bits(text):
    windows = torch.randint(0, 256, (3, text.CONTEXT + 1), dtype=torch.uint8)
    scores = torch.zeros(3, text.CONTEXT, 256)
    torch.testing.assert_close(text.bits_per_byte(scores, windows), torch.full((3,), 8.0))
    torch.testing.assert_close(text.loss(scores, windows), torch.tensor(8.0))
