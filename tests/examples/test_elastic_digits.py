import pytest

from tests.train.starting import ROOT, last_line, start

SCRIPT = ROOT / "examples/elastic_digits.py"


@pytest.mark.launches
def test_a_failure_in_the_middle_changes_nothing_in_the_result():
    plain, failed = (
        start(SCRIPT, "--epochs", "8", *options, num_ranks=2)
        for options in ((), ("--fail-at", "150"))
    )
    for done in (plain, failed):
        assert done.returncode == 0, done.stderr
        assert float(last_line(done.stdout).removeprefix("test accuracy ")) >= 0.94
    assert "goes on from step 140" in failed.stdout
    assert "as --fail-at wants it" in failed.stderr
    assert last_line(failed.stdout) == last_line(plain.stdout)
    assert "goes on" not in plain.stdout


def test_it_tells_its_options():
    done = start(SCRIPT, "--help")
    assert done.returncode == 0, done.stderr
    assert "--fail-at STEP" in done.stdout
