import re

import pytest

from hpctrain.train.metrics import read
from tests.train.starting import ROOT, last_line, start

SCRIPT = ROOT / "examples/01_four_lines.py"


def test_the_marks_of_the_lines_are_there():
    marks = re.findall(r"  # (\d)\b", SCRIPT.read_text())
    assert marks == ["1", "2", "3", "4", "5"]


@pytest.mark.launches
def test_four_ranks_on_two_nodes_learn_the_digits(tmp_path):
    shorter = tmp_path / "script.py"
    shorter.write_text(SCRIPT.read_text().replace("LEARNING_RATE = 30,", "LEARNING_RATE = 10,"))
    done = start(shorter, "--output", tmp_path, num_ranks=4, nodes=2)
    assert done.returncode == 0, done.stderr
    (record,) = read(tmp_path / "metrics.jsonl")
    assert record["accuracy"] >= 0.95
    assert (record["world_size"], record["nodes"]) == (4, 2)
    assert record["path"] == "memfd"
    assert record["rails"] >= 1
    assert last_line(done.stdout) == f"test accuracy {record['accuracy']:.4f}"


@pytest.mark.launches
@pytest.mark.conformance
def test_it_runs_alone(tmp_path):
    done = start(SCRIPT, "--output", tmp_path)
    assert done.returncode == 0, done.stderr
    (record,) = read(tmp_path / "metrics.jsonl")
    assert record["accuracy"] >= 0.975
    assert record["world_size"] == 1
