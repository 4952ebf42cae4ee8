"""A difference of two studies is reported only if its confidence interval excludes 1."""

from dataclasses import replace
from io import StringIO
from math import comb

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.core.errors import ConfigError, DataError
from hpctrain.studies.comparison import StudyComparison
from hpctrain.studies.study_results import shown
from tests.studies import generated
from tests.studies.test_statistics import noise

# six, because five repeats cannot distinguish eight points at this level
SIX = generated.config(repeats=6)


def study(records=None):
    return generated.complete(config=SIX, records=records or generated.records(SIX))


def changed(factor, only=None):
    """Return the study with steps ``factor`` times as long; ``only`` limits this to n ranks."""
    records = [
        replace(each, step_s=[factor * seconds for seconds in each.step_s])
        if only in (None, each.point["ranks"])
        else each
        for each in generated.records(SIX)
    ]
    return study(records)


def message(found, verdict):
    """Return labels and ratios of the points with a verdict."""
    points = zip(found.points, found.verdicts, strict=True)
    return [(label, ratio) for (label, ratio), each in points if each == verdict]


def test_a_study_does_not_differ_from_itself():
    found = StudyComparison(study(), study(), 0.05)
    assert [ratio.value for _, ratio in found.points] == [1.0] * 8
    assert set(found.verdicts) == {"no difference beyond noise"}


def drawn(kind, generator, factor=1):
    """Return a study with random times; steps of 4 ranks take ``factor`` times as long."""
    records = []
    for each in generated.records(SIX):
        slower = factor if each.point["ranks"] == 4 else 1
        [seconds] = noise(kind, generator, (1,))
        records.append(replace(each, step_s=[slower * float(seconds)]))
    return study(records)


def differing(kind, factor, draws):
    """Return two fractions of differing pairs: at points without and with 4 ranks."""
    generator, found = np.random.default_rng(3), np.zeros(2)
    for _ in range(draws):
        both = drawn(kind, generator), drawn(kind, generator, factor)
        pair = StudyComparison(*both, 0.05)
        labels = [label for verdict in ("slower", "faster") for label, _ in message(pair, verdict)]
        found += (
            any("ranks 4" not in each for each in labels),
            any("ranks 4" in each for each in labels),
        )
    return found / draws


def test_equal_studies_rarely_differ_and_ten_percent_is_detected():
    others, four = differing("even", 1.1, 40)
    assert others <= 0.1
    assert four >= 0.95


LONG = pytest.mark.conformance


@LONG
@pytest.mark.limit(300)
@pytest.mark.parametrize("kind", ["even", "heavy", "outliers"])
def test_at_most_a_fraction_alpha_of_500_equal_studies_is_called_different(kind):
    assert sum(differing(kind, 1, 500)) <= 0.05 + 2.5 * np.sqrt(0.05 / 500)


@pytest.mark.parametrize(
    "num", [pytest.param(num, marks=() if num == 3 else LONG) for num in (1, 2, 3, 4, 5)]
)
def test_intervals_cover_the_truth_at_their_confidence_with_few_repeats(num):
    asked = generated.config({"ranks": [1, 2]}, repeats=num)
    generator, draws = np.random.default_rng(num), 100

    def drawn(factor):
        times = [factor * noise("even", generator, (1,)) for _ in range(2 * num)]
        found = zip(generated.records(asked), times, strict=True)
        records = [replace(each, step_s=steps.tolist()) for each, steps in found]
        return generated.complete(config=asked, records=records)

    pairs = [StudyComparison(drawn(1), drawn(1.1), 0.05) for _ in range(draws)]
    ratios = [ratio for pair in pairs for _, ratio in pair.points]
    text = " ".join(printed(pairs[0]).split())
    # 2.5 % at each of the two points needs five repeats: two of C(10, 5) orders.
    assert ("too few repeats, 5 are needed" in text) == (num < 5)
    assert ("With too few repeats" in text) == (num < 5)
    if num == 1:
        assert {ratio.low for ratio in ratios} == {None}
        assert "[" not in text
        return
    message = ratios[0].confidence
    assert message == pytest.approx(1 - 2 / comb(2 * num, num)) if num < 5 else message >= 0.975
    level = {2: "66.6%", 3: "90%", 4: "97.1%"}.get(num, "no")
    assert text.count(f"] {level}") == 2 * (num < 5)
    share = np.mean([ratio.low <= 1.1 <= ratio.high for ratio in ratios])
    assert share >= message - 2.5 * np.sqrt(message * (1 - message) / len(ratios))


def printed(found):
    """Return the output on the terminal."""
    console = Console(file=StringIO(), width=300)
    console.print(found.summary())
    return console.file.getvalue()


def test_with_too_few_repeats_the_needed_number_is_reported(tmp_path):
    fast, slow = generated.complete(), generated.records()
    slow = generated.complete(records=[replace(e, step_s=[2 * s for s in e.step_s]) for e in slow])
    found = StudyComparison(fast, slow, 0.05)
    assert set(found.verdicts) == {"too few repeats, 6 are needed"}
    assert StudyComparison(fast, slow, 0.1).verdicts == ["slower"] * 8
    folders = [str(generated.write(each, tmp_path / str(id(each)))) for each in (fast, slow)]
    done = CliRunner().invoke(app, ["study", "compare", *folders, "--fail-slower"])
    assert isinstance(done.exception, ConfigError)


def test_slower_points_are_found_with_their_ratio():
    found = StudyComparison(study(), changed(1.1, only=4), 0.05)
    assert [label.split(",")[0] for label, _ in found.points] == [
        f"ranks {ranks}" for ranks in [1, 2, 4, 8] * 2
    ]
    slower = message(found, "slower")
    assert [label for label, _ in slower] == ["ranks 4, codec none", "ranks 4, codec bf16"]
    assert [ratio.value for _, ratio in slower] == [pytest.approx(1.1)] * 2
    assert message(StudyComparison(study(), changed(0.9), 0.05), "slower") == []


def test_points_whose_shortened_names_are_equal_are_distinct():
    asked = generated.config({"ranks": [1], "codec": [f"{'x' * 99}{end}" for end in "ab"]})
    one = generated.complete(config=asked, records=generated.records(asked))
    both = StudyComparison(one, one, 0.05)
    assert len(both.points) == 2


def test_points_in_only_one_study_are_named():
    records = [each for each in generated.records() if each.point["ranks"] != 2]
    found = StudyComparison(generated.complete(), generated.complete(records=records), 0.05)
    assert len(found.verdicts) == 6
    assert "not in both: ranks 2, codec none; ranks 2, codec bf16." in found.method
    with pytest.raises(DataError, match="share none"):
        StudyComparison(generated.complete(), generated.complete(records=[]), 0.05)


def test_differences_between_environments_are_reported():
    other = generated.complete(environment=generated.environment(host="login2", commit="0"))
    found = StudyComparison(generated.complete(), other, 0.05)
    assert "environments: host, commit." in found.method
    assert "environments: nothing." in StudyComparison(study(), study(), 0.05).method


@pytest.mark.parametrize(("factor", "code"), [(1.2, 1), (1.0, 0), (0.8, 0)])
def test_the_verdict_sets_the_exit_code_if_requested(tmp_path, factor, code):
    first = generated.write(study(), tmp_path / "a")
    second = generated.write(changed(factor), tmp_path / "b")
    words = ["study", "compare", str(first), str(second), "--alpha", "0.02"]
    done = CliRunner().invoke(app, [*words, "--fail-slower"])
    assert done.exit_code == code, done.output
    assert "alpha 0.02 over all of them together" in " ".join(done.output.split())
    assert f"{factor:.3f}" in done.output
    verdict = {1.2: "slower", 1.0: "no difference beyond noise", 0.8: "faster"}[factor]
    assert done.output.count(verdict) == 8
    # distinguishes the folders, whose studies have the same name
    message = f"{shown(second)} by {shown(first)}: time of a step"
    assert message.replace(" ", "") in "".join(done.output.split())
    assert CliRunner().invoke(app, words).exit_code == 0
