"""Check ``hpctrain study init`` and ``run``: output and files; no rank is started."""

import re
import shlex
from importlib import resources
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.cli.study import app
from hpctrain.core.errors import ConfigError
from hpctrain.studies.point_records import StudyFolder
from tests.studies import generated
from tests.train.starting import ROOT

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
    result = CliRunner().invoke(app, list(map(str, words)))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_init_writes_a_file_that_runs_and_keeps_an_existing_file():
    Path("x.py").touch()
    message = run("init", "new.toml", "--mode", "weak", "--command", "python x.py {batch}").stdout
    assert "hpctrain study run new.toml --dry-run" in message
    assert "15 of 15 are still" in run("run", "new.toml", "--dry-run").stdout
    Path("x.py").unlink()
    with pytest.raises(ConfigError, match=r"command.run of new.toml must .*x.py is not in"):
        run("run", "new.toml", "--dry-run")
    with pytest.raises(ConfigError, match="is not replaced"):
        run("init", "new.toml")


def test_the_study_that_init_writes_runs_in_an_empty_folder():
    message = run("init", "strong.toml").stdout
    assert "wrote examples/digits.toml, which strong.toml measures" in message
    assert "15 of 15 are still" in run("run", "strong.toml", "--dry-run").stdout
    assert sorted(path.name for path in Path("examples").iterdir()) == ["digits.py", "digits.toml"]


def test_without_scikit_learn_the_study_measures_a_script_that_needs_only_torch(monkeypatch):
    monkeypatch.setattr("hpctrain.cli.study.find_spec", lambda _name: None)
    assert "wrote examples/measured.py" in run("init", "strong.toml").stdout
    assert "15 of 15 are still" in run("run", "strong.toml", "--dry-run").stdout


def test_a_run_stops_at_an_error_that_no_point_causes():
    Path("fake.sh").write_text("echo no data; exit 1")
    result = run("run", "study.toml", "--out", "here")
    assert result.exit_code == 1
    assert "0 of 12 measured, 3 failed" in result.stdout
    assert (
        "stopped: the last attempts failed with the same error, which their points"
        in result.stdout
    )


def commands():
    """Return every distinct command line of the guide and of the help."""
    texts = [(resources.files("hpctrain.guide") / "studies.md").read_text()]
    texts += [run(*words, "--help").stdout for words in ((), *((name,) for name in NAMES))]
    found = re.findall(r"^ *(?:│ *)?hpctrain study (\S+ \S.*)$", "\n".join(texts), re.MULTILINE)
    return list(dict.fromkeys(re.split(r"\s{3,}|\s+#", each)[0] for each in found))


NAMES = ("init", "run", "import", "predict", "report", "compare", "export", "reproduce")


def test_commands_of_guide_and_help_run(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    asked = generated.config(repeats=6)
    for name in ("digits-strong", "before", "after", "codec"):
        results = generated.complete(config=asked, records=generated.records(asked))
        generated.write(results, Path("studies", name))
    for place in (Path("examples"), Path("train.py")):
        place.symlink_to(ROOT / "examples" / ("" if place.name == "examples" else "measured.py"))
    Path("cluster.toml").write_text("nodes = 8\n")
    Path("ddp.csv").write_text("nodes,ranks,seconds,samples,codec\n1,1,0.1,64,none\n")
    lines = commands()
    assert {line.split()[0] for line in lines} == set(NAMES)
    assert len(lines) > 10
    for line in sorted(lines, key=lambda each: NAMES.index(each.split()[0])):
        words = shlex.split(line)
        if words[0] == "init":
            Path(words[1]).unlink(missing_ok=True)
        if words[0] == "report" and "--out" not in words:
            words += ["--help"]  # one drawn figure is sufficient
        if words[0] == "export":
            (Path("data") / "small").mkdir(parents=True, exist_ok=True)
        if words[0] == "reproduce":
            words += ["--help"]  # tests/studies/test_archive.py measures again
        if words[0] == "run":  # other tests check the started commands
            words += ["--dry-run", "--out", "fresh"]
        assert run(*words).exit_code == 0, line


def test_a_dry_run_lists_points_and_cost_and_writes_nothing():
    message = run("run", "study.toml", "--dry-run", "--seconds-per-point", 600).stdout
    many = "oversubscribed: 2 cores on 1 host"
    assert f"nodes=4 ranks_per_node=2 depth=2  x 3  {many}\n" in message
    assert "nodes=1 ranks_per_node=2 depth=1  x 3\n" in message
    assert "the first: hpctrain launch -n " in message
    assert "12 of 12 are still to measure: 2 node-hours, 2 h in all\n" in message
    assert not Path("studies").exists()


@pytest.mark.parametrize("name", ["", "..", "a/b", "/tmp/x"])
def test_an_invalid_directory_name_and_a_repeat_out_of_range_are_rejected(name):
    Path("other.toml").write_text(STUDY.replace('"s"', f'"{name}"'))
    with pytest.raises(ConfigError, match=f"must be the name of a directory, got '{name}'"):
        run("run", "other.toml", "--dry-run")
    assert run("run", "other.toml", "--dry-run", "--out", "here").exit_code == 0
    with pytest.raises(ConfigError, match=r"between 0 and 2 for study.toml, got 3"):
        run("run", "study.toml", "--repeat", 3)


def test_a_run_reports_each_point_and_exits_with_1_if_some_failed():
    Path("study.toml").write_text(
        STUDY.replace("[1, 4]", "[1]").replace("[2]", "[1]", 1) + 'launcher = ""'
    )
    result = run("run", "study.toml", "--out", "here")
    assert result.exit_code == 1
    assert result.stdout.count("depth=1  repeat 2: 2.00 s a step, 4 samples/s") == 1
    assert result.stdout.count("failed: the command ended with exit code 7") == 3
    assert "3 of 6 measured, 3 failed; `hpctrain study report here`" in result.stdout
    assert "--retry-failed measures the failed points again" in result.stdout
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
    message = run(
        "run", "study.toml", "--slurm", "--time", "90min", "-p", "low", "--option=--qos=q"
    )
    assert "job 1: repeats 0,1,2 in studies/s\njob 2: the report\n" in message.stdout
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
