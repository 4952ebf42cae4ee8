"""Check the manual as HTML: every public name and guide is in it, and links resolve."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ended

ROOT = Path(__file__).parents[1]
HTML = ROOT / "hpctrain/guide/html"

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.requires("sphinx"),
    pytest.mark.limit(400),
]


def pages(folder):
    line = [sys.executable, HTML / "pages.py", folder]
    subprocess.run(line, check=True, cwd=ROOT)


def build(source, target):
    options = ["-q", "-W", "--keep-going", "-c", HTML]
    line = [sys.executable, "-m", "sphinx", *options, source, target]
    return ended(line)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    pages(folder / "source")
    done = build(folder / "source", folder / "html")
    assert done.returncode == 0, done.stderr
    return folder / "html"


def test_every_public_name_has_an_anchor(site):
    text = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    places = set(re.findall(r'<dt [^>]*id="hpctrain\.([\w.]+)"', text))
    lines = (ROOT / "tests/public_api.txt").read_text().splitlines()
    names = {line.partition("(")[0] for line in lines if not line.startswith("HPCTRAIN_")}
    names = {name for name in names if name and name not in ("__version__", "elastic")}
    # An optimizer has the class of torch, with methods documented on the page of the function.
    assert {name for name in names if not name.startswith("DistributedOptimizer()")} <= places


def test_guides_link_to_the_guides_that_they_name(site):
    topics = {path.stem for path in (ROOT / "hpctrain/guide").glob("*.md")}
    for topic in topics:
        text = (ROOT / f"hpctrain/guide/{topic}.md").read_text()
        prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
        named = set(re.findall(r"`hpctrain guide ([a-z-]+)`", prose)) & topics
        links = re.findall(
            r'href="(?:([\w-]+)\.html)?#?"', (site / f"guide/{topic}.html").read_text()
        )
        assert named - {topic} <= set(links), topic


def test_broken_link_and_page_outside_the_contents_are_errors(tmp_path):
    source = tmp_path / "source"
    pages(source)
    with (source / "guide/cost.md").open("a") as file:
        file.write("\n[away](nowhere.md)\n")
    (source / "guide/stray.md").write_text("# A page that nothing leads to\n")
    done = build(source, tmp_path / "html")
    assert done.returncode != 0
    assert "nowhere.md" in done.stderr
    assert "stray.md" in done.stderr
