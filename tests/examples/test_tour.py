"""Check that every claim of the tour holds, and that a false claim is an error."""

import re

import pytest

from tests.train.starting import ROOT, start

TOUR = sorted((ROOT / "examples/tour").glob("[01]*.py"))
QUICKEST = ("01", "05", "10")

pytestmark = pytest.mark.launches


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, marks=() if path.name[:2] in QUICKEST else pytest.mark.conformance)
        for path in TOUR
    ],
    ids=lambda path: path.stem,
)
def test_every_claim_of_the_tour_holds_on_two_ranks(script):
    done = start(script, num_ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^holds: ", done.stdout, re.MULTILINE)) >= 2
    assert f"hpctrain launch -n 2 -- python examples/tour/{script.name}\n" in script.read_text()


@pytest.mark.conformance
@pytest.mark.parametrize("script", TOUR, ids=lambda path: path.stem)
def test_every_claim_of_the_tour_holds_on_one_rank_and_on_three(script):
    for num_ranks in (None, 3):
        done = start(script, num_ranks=num_ranks)
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_claim_that_fails_on_one_rank_ends_all_with_an_error(tmp_path):
    script = tmp_path / "wrong.py"
    script.write_text(
        f"import sys; sys.path.append({str(ROOT / 'examples/tour')!r})\n"
        "import hpctrain as hvd; from claim import claim; hvd.init()\n"
        "claim('all ranks are rank 0', holds=hvd.rank() == 0)\n"
    )
    done = start(script, num_ranks=2)
    assert done.returncode != 0
    assert done.stdout == "FAILS: all ranks are rank 0\n"


def test_there_is_a_script_for_each_section_and_the_guide_names_it():
    guide = (ROOT / "hpctrain/guide/tour.md").read_text()
    readme = (ROOT / "examples/README.md").read_text()
    assert [path.name[:2] for path in TOUR] == [f"{n:02}" for n in range(1, 11)]
    for path in TOUR:
        assert f"`examples/tour/{path.name}`" in guide
        assert f"tour/{path.name}" in readme
