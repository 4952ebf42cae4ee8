"""Results of other tools appear in figures and tables, and do not affect the study itself."""

from dataclasses import replace

import pytest

from hpctrain.core.errors import ConfigError, DataError
from hpctrain.studies.checklist import verdicts
from hpctrain.studies.comparison import StudyComparison
from hpctrain.studies.figures import figures_of
from hpctrain.studies.imported import import_file
from hpctrain.studies.points import Placement
from hpctrain.studies.study_results import StudyResults
from tests.studies import generated

FACTORS = {"ranks": [1, 2, 4], "batch": [64]}
ROWS = ["1,1,0.10", "1,1,0.12", "2,4,0.04"]


@pytest.fixture
def study(tmp_path):
    return StudyResults.read(write(tmp_path / "study"))


def write(path, factors=FACTORS, **changes):
    config = generated.config(factors, **changes)
    records = [
        replace(each, point={"ranks": each.point["ranks"], "batch": 64})
        for each in generated.records(config)
    ]
    return generated.write(generated.complete(config=config, records=records), path)


def csv(tmp_path, rows=ROWS, head="nodes, ranks, seconds"):
    path = tmp_path / "results.csv"
    path.write_text("\n".join([head, *rows]) + "\n")
    return path


def imported(study, path, tool="DDP"):
    import_file(study.folder, study.config, path, tool)
    return StudyResults.read(study.directory)


def test_rows_of_a_point_are_its_repeats(study, tmp_path):
    found = imported(study, csv(tmp_path))
    ddp = [each for each in found.summaries if each.point.get("tool") == "DDP"]
    assert [each.times_s for each in ddp] == [[0.1, 0.12], [0.04]]
    assert [each.records[0].layout for each in ddp] == [Placement(1, 1, 1), Placement(4, 2, 2)]
    assert ddp[1].efficiency.value == pytest.approx(0.11 / 4 / 0.04)
    assert ddp[1].samples_per_s.value == 64 / 0.04
    assert found.headline.endswith("; imported results of DDP")


def test_imported_results_have_their_own_series_in_each_figure_of_sizes(study, tmp_path):
    before = {figure.name: figure for figure in figures_of(study)}
    after = {figure.name: figure for figure in figures_of(imported(study, csv(tmp_path)))}
    assert before.keys() == after.keys()
    for name in ("time", "throughput", "efficiency", "speed_up", "core-hours"):
        names = [each.name for each in after[name].series if each.kind == "points"]
        assert [text.partition(":")[0] for text in names] == ["tool digits", "tool DDP"]
        assert "tool" not in str(before[name].series)


def test_checklist_and_comparison_judge_only_the_study(study, tmp_path):
    found = imported(study, csv(tmp_path))
    assert verdicts(found) == verdicts(study)
    assert StudyComparison(study, found, 0.05).points == StudyComparison(study, study, 0.05).points


def test_a_weak_study_multiplies_its_batch_and_samples_replace_it(tmp_path):
    study = StudyResults.read(write(tmp_path / "weak", mode="weak"))
    found = imported(study, csv(tmp_path))
    assert [each.samples for each in found.imported] == [64, 64, 256]
    found = imported(study, csv(tmp_path, ["1,2,0.5,100"], "nodes,ranks,seconds,samples"))
    assert [each.samples for each in found.imported] == [100]  # replaces the first file


def test_factors_of_several_values_are_columns(tmp_path):
    config = generated.config({"nodes": [1, 2], "ranks_per_node": [2], "codec": ["none", "bf16"]})
    results = generated.complete(config=config, records=[])
    study = StudyResults.read(generated.write(results, tmp_path / "study"))
    rows = ["2,4,0.5,64,bf16", "2,3,0.5,64,bf16"]
    found = imported(study, csv(tmp_path, rows, "nodes,ranks,seconds,samples,codec"))
    assert [dict(each.point) for each in found.imported] == [
        {"tool": "DDP", "nodes": 2, "ranks_per_node": 2, "codec": "bf16"},
        {"tool": "DDP", "ranks": 3, "nodes": 2, "codec": "bf16"},
    ]


@pytest.mark.parametrize("cell", ["", " "])
def test_a_factor_of_several_values_needs_a_value_in_each_row(tmp_path, cell):
    config = generated.config({"ranks": [1, 2], "batch": [64], "codec": ["none", "bf16"]})
    results = generated.complete(config=config, records=[])
    study = StudyResults.read(generated.write(results, tmp_path / "study"))
    head = "nodes,ranks,seconds,codec,batch"
    path = csv(tmp_path, ["1,1,0.5,bf16,64", f"1,2,0.5,{cell},64"], head)
    with pytest.raises(DataError, match=r"line 3: codec must have a value, such as none"):
        imported(study, path)
    path = csv(tmp_path, [f"1,2,0.5,bf16,{cell}"], head)
    assert imported(study, path).imported[0].point["batch"] == 64  # the only value


@pytest.mark.parametrize(
    ("rows", "head", "message"),
    [
        (["1,1"], "nodes,ranks", "must name nodes, ranks, seconds, and may name samples, batch"),
        (["1,1,1,1"], "nodes,ranks,seconds,gpu", "got nodes, ranks, seconds, gpu"),
        (["1,1,1,2"], "nodes,ranks,seconds,seconds", "each once"),
        (["1;1;1"], "nodes;ranks;seconds", "separated by commas"),
        ([], "nodes,ranks,seconds", "must have a row for each repeat"),
        (["1,1,0.1", "2,1,0.1"], "nodes,ranks,seconds", "line 3: .* got 1 ranks on 2 nodes"),
        (["1,1,0"], "nodes,ranks,seconds", "line 2: seconds must be .* got '0'"),
        (["1,1,nan"], "nodes,ranks,seconds", "got 'nan'"),
        (["1,1,5e-324"], "nodes,ranks,seconds", "got '5e-324'"),
        (["1,1"], "nodes,ranks,seconds", "line 2: a line must have 3 fields, nodes, ranks, sec"),
        (["1,1,1,9"], "nodes,ranks,seconds", "line 2: a line must have 3 fields"),
        (["1,x,1"], "nodes,ranks,seconds", "line 2: ranks must be an integer from 1 to 214748"),
        (["1,1_0,1"], "nodes,ranks,seconds", "got '1_0'"),
        ([f"1,{'9' * 5000},1"], "nodes,ranks,seconds", "ranks must be an integer"),
        (["1,99999999999999999999999,1"], "nodes,ranks,seconds", "ranks must be an integer"),
        (["1,1,1,0"], "nodes,ranks,seconds,samples", "samples must be an integer from 1"),
        (["1,1,1,-5"], "nodes,ranks,seconds,samples", "got '-5'"),
    ],
)
def test_invalid_files_are_rejected_and_not_copied(study, tmp_path, rows, head, message):
    with pytest.raises(DataError, match=message):
        imported(study, csv(tmp_path, rows, head))
    assert StudyResults.read(study.directory).imported == []


def test_samples_are_required_if_the_study_has_no_batch(tmp_path):
    config = generated.config({"ranks": [1, 2]})
    results = generated.complete(config=config, records=[])
    study = StudyResults.read(generated.write(results, tmp_path / "study"))
    with pytest.raises(DataError, match="no batch, so column samples is required"):
        imported(study, csv(tmp_path))


@pytest.mark.parametrize("name", ["", "a/b", "../x", "digits"])
def test_names_of_tools_are_names_of_files_other_than_the_study(study, tmp_path, name):
    with pytest.raises(ConfigError, match="--name must contain only"):
        imported(study, csv(tmp_path), name)
