"""A browser shows every figure of a report, in any theme and width, without console messages."""

import re
import subprocess

import pytest

from hpctrain.studies.report import write_report
from hpctrain.train.history import histories
from hpctrain.train.run_report import write_report as write_runs
from tests.studies import generated
from tests.studies.test_report import Page, hostile_results
from tests.train.test_run_figures import write_run

pytestmark = [pytest.mark.conformance, pytest.mark.requires("chromium")]

LIGHT, DARK = "--blink-settings=preferredColorScheme=1", "--blink-settings=preferredColorScheme=0"


def opened(page, folder, *options):
    """Return the document after its scripts have run, and the messages on the console."""
    line = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    line += ["--v=0", f"--user-data-dir={folder}", "--virtual-time-budget=10000", *options]
    done = subprocess.run(
        [*line, "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def widths_of(document):
    return [int(width) for width in re.findall(r'class="main-svg"[^>]* width="(\d+)"', document)]


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reports")
    runs = histories([write_run(folder / "a", end="failed"), write_run(folder / "b", resumed=2)])
    return {
        "runs": write_runs(runs, folder / "runs.html"),
        "complete": write_report(generated.complete(), folder / "complete")[0],
        "hostile": write_report(hostile_results(), folder / "hostile")[0],
        "failed": write_report(generated.complete(records=[]), folder / "failed")[0],
    }


@pytest.mark.parametrize(
    ("name", "num_figures", "width", "light"),
    [
        ("complete", 8, 1280, LIGHT),
        ("complete", 8, 1280, DARK),
        ("complete", 8, 500, LIGHT),  # the minimum width of a window of Chromium
        ("hostile", 7, 1280, LIGHT),
        ("failed", 0, 1280, LIGHT),
        ("runs", 7, 1280, DARK),
        ("runs", 7, 500, LIGHT),
    ],
)
def test_a_page_opens_without_console_messages(pages, tmp_path, name, num_figures, width, light):
    document, complaints = opened(pages[name], tmp_path, light, f"--window-size={width},3000")
    assert complaints == []
    widths = widths_of(document)
    assert document.count('class="plot js-plotly-plot"') == num_figures
    assert bool(widths) == bool(num_figures)
    assert all(each < width for each in widths)
    ink = {LIGHT: "rgb(28, 32, 36)", DARK: "rgb(230, 233, 237)"}[light]
    assert not num_figures or f"fill: {ink}" in document
    legend = re.findall(r'class="legendtext"[^>]*>([^<]*)<', document)
    assert name != "hostile" or any("$\\frac{$&lt;/script&gt;" in text for text in legend)
    assert "alert(1)" not in re.findall(r"<script>([^<]*)</script>", document)


def test_a_foreign_script_is_blocked_and_reported(pages, tmp_path):
    page = tmp_path / "changed.html"
    text = pages["failed"].read_text(encoding="utf-8")
    page.write_text(text.replace("<h1>", "<script>document.title = 'foreign'</script><h1>", 1))
    document, complaints = opened(page, tmp_path, LIGHT)
    assert "<title>foreign" not in document
    assert len(complaints) == 1


def test_a_click_on_a_column_head_sorts_numerically_and_another_reverses(pages, tmp_path):
    text = pages["complete"].read_text(encoding="utf-8")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    for clicks in (1, 2):
        page = tmp_path / f"{clicks}.html"
        click = "document.querySelectorAll('#points th button')[1].click();" * clicks
        page.write_text(text.replace("</body>", f"<script>{click}</script></body>"))
        document, _ = opened(page, tmp_path, LIGHT)
        seconds = [float(row[1][1]) for row in Page(document).rows("points")]
        assert seconds == sorted(seconds, reverse=clicks == 2)
        assert len(seconds) == 8
