"""Check ``hpctrain submit`` with a simulated Slurm; tests/slurm submits to a real one."""

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hpctrain.cli.submit import app
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.launch.slurm import batch_script
from hpctrain.launch.slurm.lint.lint import gather, lint

CONFIG = """\
name = "digits"
[model]
target = "digits:model"
[data]
target = "digits:data"
"""

SBATCH = """\
#!/bin/sh
case $1 in
  --test-only) cat > tested; [ ! -e refuse ] || { echo "sbatch: error: no" >&2; exit 1; }
    echo "sbatch: Job 1 to start at noon" >&2 ;;
  *) echo "$@" >> submitted; wc -l < submitted ;;
esac
"""


@pytest.fixture(autouse=True)
def machine(tmp_path, monkeypatch):
    """Provide a login node: a configuration, and Slurm in PATH with its queue in ``waiting``."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, text in (("sbatch", SBATCH), ("squeue", "#!/bin/sh\ncat waiting\n")):
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:/usr/bin:/bin")
    monkeypatch.delenv("MPI_TYPE", raising=False)
    monkeypatch.setattr("hpctrain.launch.slurm.lint.lint.needed_pmi", lambda: "pmix")
    monkeypatch.chdir(tmp_path)
    Path("my.toml").write_text(CONFIG)
    Path("waiting").touch()


def run(*words):
    """Run the command, and raise its errors."""
    no_check = ["--no-check"] if words[:1] == ("my.toml",) else []
    result = CliRunner().invoke(app, [*map(str, words[:1]), *no_check, *map(str, words[1:])])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def options(script):
    """Return the options of sbatch in a script."""
    return [line.removeprefix("#SBATCH ") for line in script.splitlines() if "#SBATCH" in line]


def test_submit_writes_checks_and_submits_a_script_and_prints_the_next_commands():
    result = run(
        "my.toml", "--nodes", 2, "--tasks", 4, "--time", "90min", "-p", "main", "-A", "me"
    )
    assert result.exit_code == 0, result.output
    script = Path("runs/digits/job.sbatch").read_text()
    assert Path("tested").read_text() == script
    assert Path("submitted").read_text() == "--parsable runs/digits/job.sbatch\n"
    assert set(options(script)) >= {
        *("--job-name=digits", "--nodes=2", "--ntasks-per-node=4", "--time=01:30:00"),
        *("--partition=main", "--account=me", "--output=runs/digits/slurm-%j.out"),
    }
    assert "config=my.toml\n" in script
    assert 'directory="runs/digits"\n' in script
    assert "Slurm: the job would start at noon" in result.stderr
    assert result.stdout.startswith("job 1: runs/digits/job.sbatch\n")
    for line in ("squeue -j 1 ", "tail -F runs/digits/slurm-1.out ", "touch runs/digits/STOP "):
        assert f"  {line}" in result.stdout


@pytest.mark.parametrize(
    ("words", "template"),
    [
        ([], "multi_node"),
        (["--nodes", 1], "single_node"),
        (["--gpus", 4], "gpu"),
        (["--gpus", 4, "--requeue"], "requeue"),
        (["--gpus", 4, "--template", "hybrid"], "hybrid"),
    ],
)
def test_the_template_follows_from_the_options(words, template):
    script = run("my.toml", "--print", *words).stdout
    assert script.splitlines()[1] == batch_script.text(template).splitlines()[1]


@pytest.mark.parametrize("name", batch_script.names())
def test_a_template_is_printed_byte_for_byte(name):
    assert run("--template", name, "--print").stdout_bytes == batch_script.text(name).encode()


@pytest.mark.parametrize("words", [["--template"], ["my.toml", "--template", "--print"]])
def test_template_without_a_name_lists_them(words):
    lines = [line for line in run(*words).stdout.splitlines() if line[0] != " "]
    assert [line.split()[0] for line in lines] == batch_script.names()
    assert all(len(line.split()) > 3 for line in lines)


def test_a_dry_run_checks_and_submits_nothing():
    result = run("my.toml", "--dry-run", "--tasks", 3, "--gpus", 2)
    assert result.exit_code == 0
    assert Path("tested").read_text() == result.stdout
    assert (
        "warning: tasks and GPUs: each rank must have its own GPU, but 3 share 2 GPUs"
        in result.stderr
    )
    assert "do: #SBATCH --ntasks-per-node=2" in result.stderr
    assert "note: nothing was submitted or written" in result.stderr
    assert not Path("submitted").exists()
    assert not Path("runs").exists()


def test_options_of_a_job_reach_its_script():
    words = ["--requeue", "--after", "7,8", "--name", "b", "--output", "log/%j", "--cpus", 3]
    words += ["--gpus", 2, "--option", "--qos=high"]
    script = run("my.toml", "--print", *words).stdout
    assert not Path("tested").exists()  # the script is only printed
    assert not Path("runs").exists()
    assert set(options(script)) >= {
        *("--gpus-per-node=2", "--ntasks-per-node=2"),
        *("--requeue", "--dependency=afterok:7:8", "--kill-on-invalid-dep=yes", "--job-name=b"),
        *("--output=log/%j", "--cpus-per-task=3", "--qos=high"),
    }
    assert 'directory="runs/b"' in script
    assert "--no-requeue" in options(run("my.toml", "--print", "--no-requeue").stdout)


def test_each_index_of_an_array_has_a_run_of_its_own():
    words = ["--array", "0-3%2", "--name", "a", "--set", "seed=$SLURM_ARRAY_TASK_ID"]
    result = run("my.toml", *words)
    script = Path("runs/a/job.sbatch").read_text()
    assert '"--set=seed=$SLURM_ARRAY_TASK_ID"' in script
    assert 'directory="runs/a/$SLURM_ARRAY_TASK_ID"' in script
    assert {"--array=0-3%2", "--output=runs/a/slurm-%A_%a.out"} <= set(options(script))
    assert "tail -F runs/a/slurm-1_*.out" in result.stdout
    assert "hpctrain status runs/a/INDEX" in result.stdout


def test_each_index_of_an_array_has_one_directory_also_with_output_dir():
    script = run("my.toml", "--print", "--array", "0-1", "--set", "output_dir=out").stdout
    assert 'directory="out/$SLURM_ARRAY_TASK_ID"' in script
    assert "set=output_dir" not in script


def test_a_user_script_is_submitted_with_its_arguments():
    Path("train.py").write_text("import horovod.torch\n")
    result = run("--nodes", 2, "--requeue", "--array", "0-1", "--", "train.py", "--seed", "a b")
    assert result.exit_code == 0, result.output
    script = Path("runs/train/job.sbatch").read_text()
    assert "program=(python train.py --seed 'a b')" in script
    assert 'directory="runs/train/$SLURM_ARRAY_TASK_ID"' in script
    assert {"--nodes=2", "--requeue", "--job-name=train"} <= set(options(script))
    assert "to continue: the same hpctrain submit" not in script  # it is queued again by itself
    assert "--job-name=b" in options(
        run("--name", "b", "--print", "--", "python", "-m", "x").stdout
    )


def test_the_hint_after_a_stop_is_the_command_that_submitted():
    assert "to continue: the same hpctrain submit again" in run("my.toml", "--print").stdout


@pytest.mark.limit(120)
def test_a_configuration_with_unknown_names_is_not_queued(tmp_path):
    result = run(tmp_path / "my.toml")
    assert result.exit_code == 1
    assert 'model.target = "digits:model": there is no module digits' in result.stderr
    assert "--no-check submits the job without this check" in result.stderr
    assert not Path("submitted").exists()


def test_rejection_by_slurm_is_shown_and_no_files_are_left():
    Path("refuse").touch()
    result = run("my.toml")
    assert result.exit_code == 1
    assert "Slurm must accept the job, but sbatch reports: no" in result.stderr
    assert not Path("runs").exists()


def test_a_warning_of_the_checks_is_printed(monkeypatch):
    monkeypatch.setenv("MPI_TYPE", "pmi2")
    result = run("my.toml")
    assert result.exit_code == 0  # the script sources a file that may change the environment
    assert (
        "srun must use --mpi=pmix, which the MPI of this environment needs, but --mpi=pmi2"
        in result.stderr
    )


def test_an_error_of_the_checks_stops_the_submission(monkeypatch):
    text = batch_script.text("multi_node").replace("hpctrain train", "mpirun -n 4 hpctrain train")
    monkeypatch.setattr(batch_script, "text", lambda _: text)
    result = run("my.toml")
    assert result.exit_code == 1
    assert "error: nested launchers" in result.stderr
    assert not Path("runs").exists()


def test_one_job_at_a_time_works_on_a_run():
    assert run("my.toml").exit_code == 0
    Path("waiting").write_text("1 1\n")
    with pytest.raises(LaunchError, match=r"job 1 waits or runs for runs/digits.*afterany:1"):
        run("my.toml")
    assert run("my.toml", "--after", "afterany:1").exit_code == 0
    assert run("my.toml", "--name", "other").exit_code == 0
    Path("waiting").write_text("")
    assert run("my.toml").exit_code == 0
    assert Path("runs/digits/jobs.txt").read_text().split() == ["1", "2", "4"]


def test_a_finished_run_is_not_submitted_again():
    run("my.toml")
    record = {"event": "finished", "metric_name": "accuracy", "metric": 0.9}
    Path("runs/digits/metrics.jsonl").write_text(json.dumps(record) + "\n")
    with pytest.raises(ConfigError, match=r"is finished.*--name digits-2"):
        run("my.toml")


def test_no_slurm_is_a_clear_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run("my.toml")
    assert result.exit_code == 1
    assert "hpctrain: Slurm's sbatch must be in PATH, but was not found" in result.stderr
    (tmp_path / "bin/sbatch").rename(tmp_path / "qsub")
    assert "this machine has PBS (qsub)" in run("my.toml").stderr


def test_a_dry_run_without_slurm_prints_the_script_and_ends_well(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = run("my.toml", "--dry-run")
    assert result.exit_code == 0
    assert result.stdout.startswith("#!")
    assert (
        "note: Slurm has not checked the script: Slurm's sbatch must be in PATH" in result.stderr
    )
    Path("bin/sbatch").write_text(
        "#!/bin/sh\necho 'sbatch: error: contact slurm controller' >&2\nexit 1"
    )
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    result = run("my.toml", "--dry-run")
    assert (result.exit_code, "note: Slurm has not checked" in result.stderr) == (0, True)
    result = run("my.toml")
    assert result.exit_code == 1
    assert "its commands are installed, but do not reach its controller" in result.stderr
    assert (
        "set SLURM_CONF to its slurm.conf; without Slurm, --print shows the script"
        in result.stderr
    )
    Path("bin/sbatch").write_text(SBATCH)
    Path("refuse").touch()
    assert run("my.toml", "--dry-run").exit_code == 1


def test_a_script_that_is_printed_has_no_finding_where_it_is_submitted():
    script = run("my.toml", "--print", "--nodes", 2, "--tasks", 4, "--time", "1h").stdout
    levels = {found.level for found in lint(script, facts=gather())}
    assert levels <= {"ok", "note"}
    assert "--output=slurm-%x-%j.out" in options(script)


def test_ranks_share_the_cores_of_their_node_by_default(tmp_path):
    rows = "cpu* 2 32 2\ncpu* 2 64 2\nsmall 1 8 1\n"
    (tmp_path / "bin/sinfo").write_text(
        f"#!/bin/sh\nprintf '{rows}' | grep \"$(echo $* | sed -n 's/.*-p //p')\"\n"
    )
    (tmp_path / "bin/sinfo").chmod(0o755)
    result = run("my.toml", "--print", "--tasks", 8)
    assert {"--cpus-per-task=16", "--mem=0"} <= {*options(result.stdout)}
    assert "note: --cpus-per-task=16 --mem=0 for 8 ranks on a node" in result.stderr
    script = run("my.toml", "--print", "--tasks", 8, "-p", "small").stdout
    assert "--cpus-per-task=1" in options(script)
    script = run("my.toml", "--print", "--tasks", 8, "--mem", "64G").stdout
    assert {"--cpus-per-task=16", "--mem=64G"} <= {*options(script)}
    for words in (["--cpus", 2], ["--option", "--mem-per-cpu=2G"], ["--tasks", 9, "-p", "small"]):
        script = run("my.toml", "--print", "--tasks", 8, *words).stdout
        assert "--mem=0" not in options(script)


@pytest.mark.parametrize(
    ("words", "error", "text"),
    [
        ([], ConfigError, "must get a configuration"),
        (["--"], LaunchError, "must have a command"),
        (["--", "python", "no.py"], ConfigError, "but no.py does not"),
        (["--set", "a=1", "--", "python", "my.py"], ConfigError, "pass arguments to the script"),
        (["my.toml", "--", "python", "x.py"], ConfigError, "omit one"),
        (["--template", "gpu"], ConfigError, "--template NAME --print"),
        (
            ["--template", "nope", "--print"],
            ConfigError,
            "a template must be one of apptainer, .* got .nope.",
        ),
        (
            ["my.toml", "--template", "nope"],
            ConfigError,
            "a template must be one of apptainer, .* got .nope.",
        ),
        (["no.toml"], ConfigError, "no.toml"),
        (["my.toml", "--set", "train.epoch=1"], ConfigError, "epochs"),
        (["my.toml", "--time", "soon"], ConfigError, "a time limit must be"),
        (["my.toml", "--after", "the other"], LaunchError, "--after must be"),
        (["my.toml", "--name", "a$b"], ConfigError, r"without \$"),
    ],
)
def test_invalid_submissions_raise_one_error(words, error, text):
    with pytest.raises(error, match=text):
        run(*words)
    assert not Path("submitted").exists()


def test_scripts_that_are_written_are_clean_for_a_shell(tmp_path):
    script = run("my.toml", "--print", "--name", "two words", "--array", "0-1", "--gpus", 2).stdout
    (tmp_path / "a.sh").write_text(script)
    subprocess.run(["bash", "-n", "a.sh"], check=True)
    assert '--job-name="two words"' in options(script)
