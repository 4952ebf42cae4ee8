"""Predictions of a study: validation on measured sizes, and decisions about larger ones."""

from dataclasses import replace

import pytest

from hpctrain.core.errors import DataError
from hpctrain.studies.prediction import VALIDATION_HEADS, Prediction
from hpctrain.studies.report import study_page
from tests.studies import generated


def study(overhead=0.0, sizes=(1, 2, 4, 8), nodes=lambda _: 1, **changes):
    """Return a study whose step time is 0.1 s / ranks, with an overhead of (n - 1) / n."""
    config = generated.config({"ranks": list(sizes), "nodes": [1]}, cores=8, **changes)
    records = [
        replace(
            each,
            point={"ranks": (ranks := each.point["ranks"]), "nodes": nodes(ranks)},
            oversubscribed=False,
            step_s=[(0.1 / ranks + overhead * (ranks - 1) / ranks) * (1 + 0.002 * each.repeat)],
        )
        for each in generated.records(config)
    ]
    return generated.complete(config=config, records=records)


def decisions(results, **options):
    found = Prediction.of(results, **options)
    return {each.size.ranks: each.decision(found.required) for each in found.forecasts}


def test_each_size_is_predicted_from_the_smaller_ones_and_compared():
    found = Prediction.of(study(overhead=0.01))
    assert [[s.ranks for s in each.sources] for each in found.validation] == [[1, 2], [1, 2, 4]]
    assert [each.size.ranks for each in found.validation] == [4, 8]
    assert all(each.holds for each in found.validation)
    assert "In 2 of 2 validations" in found.text
    assert "not reliable" not in found.text
    assert all(len(row) == len(VALIDATION_HEADS) for row in found.validation_rows)
    assert all(len(row) == len(found.forecast_heads) for row in found.forecast_rows)


def test_a_failed_validation_is_reported():
    results = study()
    records = [
        replace(each, step_s=[0.5]) if each.point["ranks"] == 8 else each
        for each in results.records
    ]
    found = Prediction.of(replace(results, records=records))
    assert [each.holds for each in found.validation] == [True, False]
    assert "In 1 of 2 validations" in found.text
    assert "not reliable" in found.text
    assert [row[-1] for row in found.validation_rows] == ["inside", "outside"]


def test_an_interval_decides_or_is_reported_as_too_wide():
    on_nodes = {"nodes": lambda ranks: max(1, ranks // 4)}
    assert decisions(study(**on_nodes), ranks=[16]) == {16: "yes"}
    assert decisions(study(overhead=0.05, **on_nodes), ranks=[16]) == {16: "no"}
    [text] = decisions(study(overhead=0.001, **on_nodes), ranks=[16], required=0.87).values()
    assert text.startswith("undecided: the interval is too wide to decide; measure more than 8")
    found = Prediction.of(study(overhead=0.001, **on_nodes), ranks=[16], required=0.87)
    assert "For 16 ranks the prediction does not decide" in found.text


def test_sizes_far_away_and_unmeasured_networks_are_undecided():
    assert decisions(study(), ranks=[16, 64]) == {
        16: "undecided: no measured point has several nodes; measure 2 nodes",
        64: "undecided: more than 4 times the measured ranks; measure more than 8 ranks",
    }


def test_nodes_are_not_validated_from_one_node():
    found = Prediction.of(study(nodes=lambda ranks: max(1, ranks // 4)))
    assert [each.size.ranks for each in found.validation] == [4]
    found = Prediction.of(study(nodes=lambda ranks: max(1, ranks // 2)))
    assert [each.size.ranks for each in found.validation] == [8]


def test_too_few_sizes_are_named_and_measured_sizes_are_not_predicted():
    found = Prediction.of(study(sizes=(1, 2)))
    assert (found.validation, found.forecasts) == ([], [])
    assert "needs 3 sizes with a core for each rank; measured sizes of digits: 2" in found.text
    with pytest.raises(DataError, match=r"--ranks must be above 8, .* got 4"):
        Prediction.of(study(), ranks=[4])


def test_the_report_has_both_tables():
    page = study_page(study(overhead=0.01), [])
    for text in ('<table id="predicted">', '<table id="validation">', "validations the intervals"):
        assert text in page
    assert "Prediction" not in study_page(study(sizes=(1, 2)), [])
