"""``hpctrain study init`` and ``run``: what they print and write; no rank is started."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.cli.study import study
from hpctrain.core.errors import ConfigError
from hpctrain.studies.records import StudyFolder

SBATCH = """\
#!/bin/sh
case $1 in
  --test-only) cat > tested; echo "sbatch: Job 1 to start at noon" >&2 ;;
  *) echo "$@" >> submitted; wc -l < submitted ;;
esac
"""

STUDY = """
factors = { nodes = [1, 4], ranks_per_node = [2], depth = [1, 2] }
study = { name = "s", repeats = 3, warm_up = 0, cores = 2 }
[command]
run = "sh fake.sh {ranks} {depth}"
"""

FAKE = """
echo '{"step": 0, "at": 1, "samples": 8, "seconds": 2}' > $HPCTRAIN_RECORDS/rank-0.jsonl
[ $2 = 1 ] || exit 7
"""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("study.toml").write_text(STUDY)
    Path("fake.sh").write_text(FAKE)


def run(*words):
    result = CliRunner().invoke(study, list(map(str, words)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_init_writes_a_file_that_runs_and_leaves_one_that_exists():
    said = run("init", "new.toml", "--mode", "weak", "--command", "python x.py {batch}").stdout
    assert "hpctrain study run new.toml --dry-run" in said
    assert "20 of 20 are left" in run("run", "new.toml", "--dry-run").stdout
    with pytest.raises(ConfigError, match="left as it is"):
        run("init", "new.toml")


def test_a_dry_run_lists_points_and_cost_and_writes_nothing():
    said = run("run", "study.toml", "--dry-run", "--seconds-per-point", 600).stdout
    many = "oversubscribed: 2 cores on each of 1 hosts"
    assert f"nodes=4 ranks_per_node=2 depth=2  x 3  {many}\n" in said
    assert "nodes=1 ranks_per_node=2 depth=1  x 3\n" in said
    assert "the first: hpctrain launch -n " in said
    assert "12 of 12 are left to measure: 2 node-hours, 2 h in all\n" in said
    assert not Path("studies").exists()


def test_a_run_tells_each_point_and_ends_with_1_where_some_have_failed():
    Path("study.toml").write_text(
        STUDY.replace("[1, 4]", "[1]").replace("[2]", "[1]", 1) + 'launcher = ""'
    )
    result = run("run", "study.toml", "--out", "here")
    assert result.exit_code == 1
    assert result.stdout.count("depth=1  repeat 2: 2.00 s a step, 4 samples/s\n") == 1
    assert result.stdout.count("failed: it ended with exit code 7") == 3
    assert "6 of 6 measured, 3 failed; `hpctrain study report here`" in result.stdout
    assert len(StudyFolder(Path("here")).read_points()) == 6
    again = run("run", "study.toml", "--out", "here")
    assert "repeat" not in again.stdout
    assert (
        run("run", "study.toml", "--out", "here", "--retry-failed").stdout.count("failed: ") == 3
    )


def test_on_slurm_each_repeat_is_a_job_of_an_array_and_a_report_waits_for_all(
    tmp_path, monkeypatch
):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(SBATCH)
    (tmp_path / "bin/sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:/usr/bin:/bin")
    monkeypatch.delenv("MPI_TYPE", raising=False)
    said = run("run", "study.toml", "--slurm", "--time", "90min", "-p", "low", "--option=--qos=q")
    assert "job 1: repeats 0,1,2 in studies/s\njob 2: the report\n" in said.stdout
    job, report = (Path(f"studies/s/{name}.sbatch").read_text() for name in ("job", "report"))
    for line in ("array=0,1,2", "nodes=4", "ntasks-per-node=2", "time=01:30:00", "qos=q"):
        assert f"#SBATCH --{line}\n" in job
    assert "config=studies/s/STUDY.toml\n" in job
    for line in ("dependency=afterany:1", "nodes=1", "partition=low", "export=ALL,PART=report"):
        assert f"#SBATCH --{line}\n" in report
    assert "--array" not in report
    kept = Path("studies/s/STUDY.toml").read_text()
    assert 'launcher = "srun --nodes={nodes}' in kept
    assert "hosts = 4" in kept
