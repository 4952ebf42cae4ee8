"""Two studies compared differ where their intervals say so, and nowhere else."""

from dataclasses import replace

import numpy as np
import pytest
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.core.errors import ConfigError, DataError
from hpctrain.studies.comparison import StudyComparison, rank_test
from tests.studies import generated

SIX = generated.facts(repeats=6)  # five repeats cannot tell eight points apart


def study(records=None):
    return generated.complete(facts=SIX, records=records or generated.records(SIX))


def changed(factor, only=None):
    """The study with steps that take ``factor`` times as long, of ``only`` so many ranks."""
    records = [
        replace(each, step_s=[factor * seconds for seconds in each.step_s])
        if only in (None, each.point["ranks"])
        else each
        for each in generated.records(SIX)
    ]
    return study(records)


def test_a_study_is_like_itself():
    found = StudyComparison(study(), study(), 0.05)
    assert [each.ratio.value for each, _ in found.verdicts] == [1.0] * 8
    assert found.slower == []


def test_equal_studies_differ_as_seldom_as_alpha_says():
    generator = np.random.default_rng(0)
    noise = generator.lognormal(0, 0.02, (200, 2, 5))
    alone = sum(rank_test(*pair.tolist()) <= 0.05 for pair in noise)
    assert 2 <= alone <= 10  # 8 of 252 orders of ten are as extreme: 6 of 200
    assert sum(different(generator) for _ in range(12)) <= 1


def different(generator):
    """Whether any of eight equal points is called different."""
    studies = [
        study(
            [
                replace(each, step_s=[float(generator.lognormal(0, 0.02))])
                for each in generated.records(SIX)
            ]
        )
        for _ in range(2)
    ]
    return any(
        verdict in ("slower", "faster") for _, verdict in StudyComparison(*studies, 0.05).verdicts
    )


def test_too_few_repeats_say_how_many_are_needed(tmp_path):
    fast, slow = generated.complete(), generated.records()
    slow = generated.complete(records=[replace(e, step_s=[2 * s for s in e.step_s]) for e in slow])
    found = StudyComparison(fast, slow, 0.05)
    assert {verdict for _, verdict in found.verdicts} == {"too few repeats to tell, 6 are needed"}
    assert len(StudyComparison(fast, slow, 0.1).slower) == 8
    folders = [str(generated.write(each, tmp_path / str(id(each)))) for each in (fast, slow)]
    done = CliRunner().invoke(app, ["study", "compare", *folders, "--fail-slower"])
    assert isinstance(done.exception, ConfigError)


def test_what_is_slower_is_found_with_its_ratio():
    found = StudyComparison(study(), changed(1.1, only=4), 0.05)
    assert {each.point["ranks"] for each in found.slower} == {4}
    assert [each.point["ranks"] for each, _ in found.verdicts] == [1, 2, 4, 8] * 2
    assert [each.ratio.value for each in found.slower] == [pytest.approx(1.1)] * 2
    assert StudyComparison(study(), changed(0.9), 0.05).slower == []


def test_points_of_one_study_alone_are_named():
    records = [each for each in generated.records() if each.point["ranks"] != 2]
    found = StudyComparison(generated.complete(), generated.complete(records=records), 0.05)
    assert len(found.verdicts) == 6
    assert "not in both: ranks 2, codec none; ranks 2, codec bf16." in found.method.replace(
        "ranks 2, codec bf16; ranks 2, codec none", "ranks 2, codec none; ranks 2, codec bf16"
    )
    with pytest.raises(DataError, match="share none"):
        StudyComparison(generated.complete(), generated.complete(records=[]), 0.05)


@pytest.mark.parametrize(("factor", "code"), [(1.2, 1), (1.0, 0), (0.8, 0)])
def test_the_command_fails_on_a_slower_study_where_asked_to(tmp_path, factor, code):
    first = generated.write(study(), tmp_path / "a")
    second = generated.write(changed(factor), tmp_path / "b")
    words = ["study", "compare", str(first), str(second), "--alpha", "0.02"]
    page = tmp_path / "ratio.html"
    done = CliRunner().invoke(app, [*words, "--fail-slower", "--html", str(page)])
    assert done.exit_code == code, done.output
    assert "alpha 0.02 over all of them together" in done.output
    assert f"{factor:.3f}" in done.output
    verdict = {1.2: "slower", 1.0: "no difference beyond noise", 0.8: "faster"}[factor]
    assert done.output.count(verdict) == 8
    text = page.read_text(encoding="utf-8")
    assert text.count(f">{verdict}</td>") == 8
    assert '"name": "ratio"' in text
    assert CliRunner().invoke(app, words).exit_code == 0


@pytest.mark.parametrize("command", ["report", "compare"])
def test_each_command_has_help_with_examples(command):
    done = CliRunner().invoke(app, ["study", command, "--help"])
    assert done.exit_code == 0
    assert done.output.count(f"hpctrain study {command} studies/") == 2
