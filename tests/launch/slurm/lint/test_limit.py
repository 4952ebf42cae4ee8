"""The time limit of a job against the checkpoints of its run."""

from pathlib import Path

import pytest

from hpctrain.launch.slurm import batch_script
from hpctrain.launch.slurm.lint.lint import DEFAULT_EVERY, lint
from hpctrain.launch.slurm.lint.script import LintFacts
from hpctrain.train.config import CheckpointConfig
from tests.launch.slurm.lint.scripts import HEALTHY


@pytest.mark.parametrize(
    ("limit", "every", "levels"),
    [
        ("02:00:00", "every = '3h'", ["warning"]),
        ("20", "every = '20min 1s'", ["warning"]),
        ("20", "every = '20min'", ["ok"]),
        ("20", "every = 500", ["ok"]),
        ("20", "every = 'none'", ["ok"]),
        ("5", "", ["note"]),  # nobody has chosen the ten minutes
        ("10", "", ["ok"]),
        ("UNLIMITED", "every = '3h'", ["ok"]),
        ("20", "every = 'never'", ["ok"]),  # the run itself will refuse it
        ("20", "nothing that TOML knows", ["ok"]),
    ],
)
def test_the_time_limit_covers_the_time_between_two_checkpoints(tmp_path, limit, every, levels):
    (tmp_path / "my.toml").write_text(f"[checkpoint]\n{every}\n" if every else "name = 'x'\n")
    script = HEALTHY.replace("--time=02:00:00", f"--time={limit}")
    facts = LintFacts(needed_pmi="pmix", directory=tmp_path)
    assert [found.level for found in lint(script, facts=facts)] == levels
    overridden = script.replace("my.toml", "my.toml --set checkpoint.every=1min")
    assert [found.level for found in lint(overridden, facts=facts)] == ["ok"]


def test_the_configuration_is_found_by_the_variable_of_the_submission(tmp_path):
    path = tmp_path / "long.toml"
    path.write_text("[checkpoint]\nevery = '3h'\n")
    facts = LintFacts(needed_pmi="pmix", environ={"CONFIG": str(path)}, directory=Path("/"))
    (found,) = lint(batch_script.text("requeue"), facts=facts)
    assert (found.check, found.level) == ("time limit", "warning")


def test_the_default_between_checkpoints_is_the_runs_own():
    assert CheckpointConfig().every == DEFAULT_EVERY
