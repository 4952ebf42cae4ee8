import pytest

from tests.train.starting import ROOT, last_line, start


@pytest.mark.launches
def test_a_failure_in_the_middle_costs_the_steps_since_the_last_commit():
    options = ("--epochs", "8", "--fail-at", "150")
    done = start(ROOT / "examples/elastic_digits.py", *options, num_ranks=2)
    assert done.returncode == 0, done.stderr
    assert "goes on from step 140\n" in done.stdout
    assert "rank 1: step 150 fails, as --fail-at wants it" in done.stderr
    assert float(last_line(done.stdout).removeprefix("test accuracy ")) >= 0.94
