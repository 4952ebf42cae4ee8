"""The report has the numbers of the statistics, names missing data, and escapes all names."""

import io
import json
import re
import sys
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pytest
from rich.console import Console
from typer.testing import CliRunner

from hpctrain.cli.main import app
from hpctrain.core.errors import ConfigError, DataError
from hpctrain.report.drawing import draw_files
from hpctrain.studies.figures import figures_of
from hpctrain.studies.report import POINT_HEADS, study_page, summary_of, write_report
from hpctrain.studies.study_file import CommandTable, StudyConfig, StudyTable
from hpctrain.studies.study_results import StudyResults
from tests.studies import generated

HOSTILE = "[red]\x1b[2J$\\frac{$</script><script>alert(1)</script><img onerror=alert()>&amp;\ud800"


class Page(HTMLParser):
    """Tables of a page by id, with text and sort value of each cell, and all tags."""

    def __init__(self, text):
        super().__init__()
        self.tables, self.tags, self._rows, self._in_cell = {}, [], None, False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag == "table":
            self._rows = self.tables[values["id"]] = []
        elif tag == "tr":
            self._rows.append([])
        elif tag == "td":
            self._rows[-1].append(["", values.get("data-v")])
            self._in_cell = True

    def handle_endtag(self, tag):
        self._in_cell &= tag != "td"

    def handle_data(self, data):
        if self._in_cell:
            self._rows[-1][-1][0] += data

    def rows(self, name):
        return [row for row in self.tables[name] if row]


def page_of(results):
    text = study_page(results, figures_of(results))
    return text, Page(text)


def drawn(text):
    """Return the figures embedded in a page, by name."""
    [found] = re.findall(r'<script type="application/json" id="figures">(.*?)</script>', text)
    return {figure["name"]: figure for figure in json.loads(found)["figures"]}


def shown(results, width=100):
    out = io.StringIO()
    Console(file=out, width=width).print(summary_of(results))
    return out.getvalue()


@pytest.fixture(scope="module")
def results():
    return generated.complete()


def test_numbers_of_the_page_equal_the_statistics(results):
    text, page = page_of(results)
    rows = page.rows("points")
    assert len(rows) == len(results.summaries) == 8
    assert ">efficiency at ranks 4, codec bf16<" in text  # the heading of a card names the curve
    place = {name: POINT_HEADS.index(name) for name in POINT_HEADS}
    for row, summary in zip(rows, results.summaries, strict=True):
        value = {name: row[place[name]][1] for name in place}
        assert float(value["step"]) == summary.step_s.value
        assert float(value["samples/s"]) == summary.samples_per_s.value
        assert float(value["exposed communication"]) == summary.median_of("communication_s").value
        assert float(value["in nodes"]) == 4e6 * (summary.ranks - 1)
        assert (value["efficiency"] is None) == summary.oversubscribed
        if not summary.oversubscribed:
            assert float(value["efficiency"]) == summary.efficiency.value
    estimates = {(s.ranks, s.step_s.value, s.step_s.low, s.step_s.high) for s in results.summaries}
    message = {
        (x, y, y - below, y + above)
        for series in drawn(text)["time"]["series"]
        if series["kind"] in ("points", "hollow")
        for x, y, below, above in zip(*map(series.get, ("x", "y", "below", "above")), strict=True)
    }
    assert sorted(message) == [pytest.approx(each) for each in sorted(estimates)]
    repeats = [series for series in drawn(text)["time"]["series"] if series["kind"] == "repeats"]
    assert sorted(y for series in repeats for y in series["y"]) == sorted(
        each.mean_step_s for each in results.done
    )


def test_the_mlperf_score_omits_best_and_worst(results):
    _, page = page_of(results)
    times = sorted(each.time_to_target_s for each in results.summaries[0].done)
    [score] = [row[-3] for row in page.rows("points")][:1]
    assert float(score[1]) == pytest.approx(sum(times[1:-1]) / 3)


def test_a_page_needs_no_network_and_allows_only_its_own_scripts(results):
    text, page = page_of(results)
    for tag, values in page.tags:
        assert tag not in ("link", "iframe", "img", "object")
        assert not {"src", "href", "onclick", "onload"} & values.keys()
    [policy] = [v["content"] for _, v in page.tags if v.get("http-equiv")]
    assert policy.startswith("default-src 'none';")
    assert policy.count("'sha256-") == 2
    assert "script-src 'sha256" in policy
    # strings inside plotly's script
    assert len(re.findall(r"<script\b", text)) == 3 + text.count('"<script')


def test_the_checklist_of_the_page_names_missing_data():
    _, page = page_of(generated.complete(bound=None))
    missing = [row for row in page.rows("checklist") if row[0][1] == "0"]
    [(_, _, (advice, _), _)] = missing
    assert advice.startswith(
        "the report has no model of the machine; describe the machine in a file: hpctrain study"
    )
    assert len(page.rows("checklist")) == 16


def hostile_results():
    points = [{"ranks": ranks, "a": f"{which}{HOSTILE}"} for ranks in (1, 2) for which in (1, 2)]
    records = [generated.record(points[order % 4], order // 4, order) for order in range(8)]
    records[0] = replace(
        records[0], status="failed", error=HOSTILE, folder=HOSTILE, metric_name=HOSTILE
    )
    asked = StudyConfig(
        factors={"ranks": [1, 2], "a": [HOSTILE]},
        study=StudyTable(name=HOSTILE, target={HOSTILE: 1}),
        command=CommandTable(run=f"{{a}}{HOSTILE}", launcher="{ranks}" + HOSTILE),
    )
    environment = generated.environment(
        host=HOSTILE,
        cpu=HOSTILE,
        commit=HOSTILE,
        versions={HOSTILE: HOSTILE},
        plan={HOSTILE: "<b>"},
    )
    records = [replace(each, metric_name=HOSTILE) for each in records]
    return StudyResults(asked, environment, records, bound=generated.bound)


def test_hostile_names_are_escaped_everywhere(tmp_path):
    results = hostile_results()
    page, *figures = write_report(results, tmp_path)
    text = page.read_text(encoding="utf-8")
    assert "<script>alert" not in text
    assert "<img" not in re.sub(r"<script>.*?</script>", "", text, flags=re.DOTALL)
    parsed = Page(text)
    [failed] = parsed.rows("failed")
    assert "<script>alert(1)</script>" in failed[3][0]
    assert any("alert(1)" in each["name"] for each in drawn(text)["time"]["series"])
    assert "repeat 0: [red]" in shown(results, width=400)
    assert "\x1b" not in shown(results)
    assert all(path.stat().st_size > 1000 for path in figures)


def test_a_report_of_failures_only_reports_that_nothing_was_measured(tmp_path):
    records = generated.records(status="failed", step_s=[], error="exit code 1\n  no memory")
    results = generated.complete(records=records)
    assert [path.name for path in write_report(results, tmp_path)] == ["report.html"]
    text, page = page_of(results)
    assert "Nothing was measured." in text
    assert len(page.rows("failed")) == len(records)
    assert page.rows("failed")[0][3][0] == "exit code 1\n  no memory"
    assert "nothing was measured" in shown(results)
    assert "0 repeats measured, 40 failed" in shown(results)


def test_the_text_summary_has_points_failures_and_missing_data(results):
    text = shown(results)
    assert "16 of 16 rules are kept" in text
    assert f"{results.summaries[1].efficiency.value:.1%}" in text
    assert text.count("(more ranks than cores)") == 2
    records = generated.records()
    records[0] = replace(records[0], status="failed", error="exit code 1")
    text = shown(generated.complete(records=records, bound=None), width=200)
    assert "failed: ranks" in text
    assert "exit code 1" in text
    assert "missing: A bound from a performance model" in text


def test_the_command_writes_the_page_and_its_figures(tmp_path, results):
    folder = generated.write(results, tmp_path / "study")
    machine = tmp_path / "machine.toml"
    machine.write_text("nodes = 8\n")
    words = ["study", "report", str(folder), "--machine", str(machine)]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert "16 of 16 rules are kept" in done.output
    names = {path.name for path in (folder / "plots").iterdir()}
    kinds = [figure.name for figure in figures_of(results)]
    assert len(kinds) == 10
    assert names == {f"{kind}.{ending}" for kind in kinds for ending in ("png", "svg")}
    assert (folder / "plots/time.png").read_bytes().startswith(b"\x89PNG")
    assert "figures into plots in the same directory" in done.output
    shown = drawn((folder / "report.html").read_text(encoding="utf-8"))
    again = StudyResults.read(folder)
    assert {s["kind"] for s in shown["time"]["series"]} >= {"dashed", "dotted", "hollow"}
    assert [s.step_s for s in again.summaries] == [s.step_s for s in results.summaries]


def test_impossible_reports_raise_errors_with_a_remedy(tmp_path, results, monkeypatch):
    with pytest.raises(DataError, match="hpctrain study run writes it"):
        StudyResults.read(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="name another file with --out"):
        write_report(results, tmp_path / "file")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"pip install 'hpctrain\[plots\]'"):
        draw_files([], tmp_path)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(
        ConfigError, match=r"plotly must be installed.*pip install 'hpctrain\[plots\]'"
    ):
        page_of(results)


def test_a_study_with_required_values_only_is_reported():
    bare = {
        name: None
        for name in asdict(generated.record({"ranks": 1}, 0, 0))
        if name.endswith(("_s", "_bytes")) and name != "step_s"
    }
    bare |= {"loss": None, "metric": None, "metric_name": None, "steps_to_target": None}
    asked = generated.config({"ranks": [1, 2]}, target={})
    records = [replace(each, **bare) for each in generated.records(asked)]
    results = StudyResults(asked, None, records)
    text, page = page_of(results)
    assert set(drawn(text)) == {"time", "throughput", "speed_up", "efficiency", "core-hours"}
    assert len(page.rows("points")) == 2
