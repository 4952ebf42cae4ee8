"""Check ``hpctrain plan`` for layouts: output, options for model and machine, and errors."""

import json
import re
import sys

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from tests.processes import ended

GIVEN = ("--params", "7.5e9", "--nodes", "8", "--gpus-per-node", "8", "--batch", "512")

MODEL = """
from torch import nn


def model():
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return nn.ModuleList([nn.Embedding(300, 64), nn.TransformerEncoder(layer, 6)])


def bare():
    return nn.Linear(64, 64)
"""


def ask(*words):
    return CliRunner().invoke(app, ["plan", *words])


def message(*words):
    result = ask(*words)
    assert result.exit_code == 0, f"{result.output} {result.exception!r}"
    return result.output


def test_the_tables_have_five_layouts_and_the_reasons_of_all_others():
    output = message(*GIVEN)
    assert "7,500,000,000 parameters: layers 36, hidden 4096, heads 32" in output
    assert "assumed: layers, hidden, heads, sequence, vocabulary" in output
    assert "120 GB: 16 bytes per parameter (itself 2, gradient 2, optimizer 12)" in output
    for title in (
        "the best layouts, predicted",
        "memory of the fullest rank",
        "shares of the time",
    ):
        rows = output.partition(title)[2].partition("┡")[2].partition("└")[0].splitlines()[1:]
        assert [row.split()[1] for row in rows if row.strip()] == ["1", "2", "3", "4", "5"]
    assert re.search(r"\d+  does not fit", output)
    assert re.search(r"\d+  slower by bubble", output)
    assert re.search(r"\d+  tp spans nodes", output)
    assert max(map(len, output.partition("the best")[2].splitlines())) <= 100


def test_seventy_billion_parameters_take_more_than_a_terabyte():
    words = ("--params", "70e9", "--nodes", "16", "--gpus-per-node", "8")
    assert "state    1.12 TB: 16 bytes per parameter" in message(*words)
    assert json.loads(message(*words, "--json"))["model"]["state_bytes"] == 1.12e12


def test_json_has_every_figure_and_the_counts_add_up():
    found = json.loads(message(*GIVEN, "--json"))
    assert {"model", "machine", "batch", "best", "broken", "lost"} < set(found)
    assert len(found["best"]) == 5
    for one in found["best"]:
        assert one["tp"] * one["pp"] * one["dp"] * one["cp"] == 64
        assert sum(one["terms_s"].values()) == pytest.approx(one["step_s"])
        assert sum(one["memory_bytes"].values()) == pytest.approx(one["rank_bytes"])
        assert one["load"]["node_bytes"] + one["load"]["network_bytes"] > 0
    assert sum(found["lost"].values()) == found["num_layouts"] - 5
    fixed = json.loads(message(*GIVEN, "--json", "--fix", "tp=4", "--fix", "zero=1"))["best"]
    assert {(one["tp"], one["zero"]) for one in fixed} == {(4, 1)}


def test_a_machine_file_supplies_values_that_the_command_line_omits(tmp_path):
    file = tmp_path / "machine.toml"
    file.write_text(
        "nodes = 4\nranks_per_node = 2\nmemory_bytes = 16e9\nflops_per_s = 20e12\n"
        "network = { latency_s = 5e-6, bytes_per_s = 1e9 }\n"
    )
    words = ("--params", "1e9", "--machine", str(file), "--json")
    machine = json.loads(message(*words))["machine"]
    assert (machine["nodes"], machine["memory_bytes"], machine["flops_per_s"]) == (4, 16e9, 20e12)
    more = json.loads(message(*words, "--nodes", "2", "--memory", "24GB", "--flops", "30T"))[
        "machine"
    ]
    assert more == machine | {"nodes": 2, "memory_bytes": 24e9, "flops_per_s": 30e12}
    assert "assumed" not in message(*words[:-1], "--batch", "64").partition("machine ")[2]


def test_a_user_model_supplies_its_sizes_and_options_the_others(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "mine_for_plan.py").write_text(MODEL)
    words = ("--nodes", "1", "--gpus-per-node", "2", "--sequence", "64", "--json")
    found = json.loads(message("--model", "mine_for_plan:model", *words))["model"]
    names = ("layers", "hidden", "heads", "vocabulary", "sequence")
    assert [found[name] for name in names] == [6, 64, 4, 300, 64]
    bare = ask("--model", "mine_for_plan:bare", *words)
    assert "give --layers, --hidden, --heads too" in str(bare.exception)
    assert "there is no module absent; start hpctrain in its folder" in str(
        ask("--model", "absent:model", *words).exception
    )


def test_a_plan_by_numbers_loads_neither_torch_nor_mpi():
    code = (
        "import sys; from hpctrain.cli.main import app\n"
        f"try: app({['plan', *GIVEN]!r})\n"
        "except SystemExit: print(sorted({'torch', 'mpi4py'} & sys.modules.keys()))"
    )
    done = ended([sys.executable, "-c", code], timeout=60)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "a plan must be for a goal .* got neither; request one of them"),
        ((*GIVEN, "--samples", "1M"), "got --samples, --gpus-per-node, --nodes; request one"),
        (("runs/x", "--nodes", "3"), "got a run directory, --nodes; request one of them"),
        (("--params", "1e9"), "got no nodes with no GPUs; give --nodes and --gpus-per-node"),
        (("--nodes", "1", "--gpus-per-node", "1"), "use --params, or --layers and --hidden"),
        ((*GIVEN, "--memory", "8GB", "--nodes", "1"), "GB too much .*; use 4 nodes, or"),
        ((*GIVEN, "--fix", "tp"), "tp must be an integer, got ''"),
        ((*GIVEN, "--fix", "tp=3"), "84 divisions of 64 ranks break one: not as fixed: 84"),
        ((*GIVEN, "--heads", "7"), "got 7 heads and a hidden size of 4096"),
        ((*GIVEN, "--layers", "1", "--hidden", "999983"), "layers must have parameters, got"),
        (("--samples", "3", "--batch", "4"), "use --machine FILE"),
    ],
)  # fmt: skip
def test_unsupported_plans_are_rejected(words, complaint):
    result = ask(*words)
    assert result.exit_code != 0
    assert re.search(complaint, str(result.exception)), result.exception


@pytest.mark.parametrize("words", [("--nodes", "0"), ("--memory", "40"), ("--params", "few")])
def test_invalid_numbers_are_rejected(words):
    assert ask(*GIVEN, *words).exit_code == 2
