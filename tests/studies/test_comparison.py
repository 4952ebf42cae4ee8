"""Two studies compared differ where their intervals say so, and nowhere else."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.core.errors import DataError
from hpctrain.studies.comparison import StudyComparison
from tests.studies import generated


def changed(factor, only=None):
    """The study with steps that take ``factor`` times as long, of ``only`` so many ranks."""
    records = [
        replace(each, step_s=[factor * seconds for seconds in each.step_s])
        if only in (None, each.point["ranks"])
        else each
        for each in generated.records()
    ]
    return generated.complete(records=records, facts=generated.facts(name="after"))


def test_a_study_is_like_itself():
    found = StudyComparison(generated.complete(), generated.complete(), 0.05)
    assert [each.ratio.value for each in found.points] == [1.0] * 8
    assert found.slower == []


def test_noise_is_no_difference():
    records = [
        replace(generated.record(each.point, each.repeat, each.order + 999), order=each.order)
        for each in generated.records()
    ]
    found = StudyComparison(generated.complete(), generated.complete(records=records), 0.01)
    assert any(each.ratio.value > 1 for each in found.points)
    assert not any(each.is_different for each in found.points)
    assert found.slower == []


def test_what_is_slower_is_found_with_its_ratio():
    found = StudyComparison(generated.complete(), changed(1.1, only=4), 0.05)
    assert {each.point["ranks"] for each in found.slower} == {4}
    assert [each.ratio.value for each in found.slower] == [pytest.approx(1.1)] * 2
    assert StudyComparison(generated.complete(), changed(0.9), 0.05).slower == []


def test_points_of_one_study_alone_are_named():
    records = [each for each in generated.records() if each.point["ranks"] != 2]
    found = StudyComparison(generated.complete(), generated.complete(records=records), 0.05)
    assert len(found.points) == 6
    assert "not in both: ranks 2, codec none; ranks 2, codec bf16." in found.method.replace(
        "ranks 2, codec bf16; ranks 2, codec none", "ranks 2, codec none; ranks 2, codec bf16"
    )
    with pytest.raises(DataError, match="share none"):
        StudyComparison(generated.complete(), generated.complete(records=[]), 0.05)


@pytest.mark.parametrize(("factor", "code"), [(1.2, 1), (1.0, 0), (0.8, 0)])
def test_the_command_fails_on_a_slower_study_where_asked_to(tmp_path, factor, code):
    first = generated.write(generated.complete(), tmp_path / "a")
    second = generated.write(changed(factor), tmp_path / "b")
    words = ["study", "compare", str(first), str(second), "--alpha", "0.1"]
    page = tmp_path / "ratio.html"
    done = CliRunner().invoke(app, [*words, "--fail-slower", "--html", str(page)])
    assert done.exit_code == code, done.output
    assert "alpha 0.1 over all of them together" in done.output
    assert f"{factor:.3f}" in done.output
    verdict = {1.2: "slower", 1.0: "no difference beyond noise", 0.8: "faster"}[factor]
    assert done.output.count(verdict) == 8
    text = page.read_text(encoding="utf-8")
    assert text.count(f">{verdict}</td>") == 8
    assert '"name": "ratio"' in text
    assert CliRunner().invoke(app, words).exit_code == 0
