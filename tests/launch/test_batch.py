"""Job templates: package and checkout have the same files; settings replace their lines."""

import re
import shlex
import subprocess
from dataclasses import fields, replace
from pathlib import Path

import pytest

from hpctrain.core.errors import ConfigError
from hpctrain.launch.slurm import batch_script
from hpctrain.launch.slurm.batch_script import BatchSettings
from tests.processes import ended

ROOT = Path(__file__).parents[2]
PACKAGED, CHECKOUT = ROOT / "hpctrain/launch/templates", ROOT / "slurm"

NAMES = [
    "apptainer",
    "chain",
    "gpu",
    "hybrid",
    "mpirun",
    "multi_node",
    "requeue",
    "restart",
    "single_node",
    "staged_data",
    "study",
]

# "study" starts and checks its points itself
TRAINING = [name for name in NAMES if name != "study"]

SETTINGS = BatchSettings(
    job_name="big run",
    partition="a,b",
    account="me",
    nodes=7,
    ntasks_per_node=3,
    cpus_per_task=5,
    mem="64G",
    time="1-02:03:04",
    gpus_per_node=3,
    output="out/%x.txt",
    array="0-7%2",
    dependency="afterok:5",
    requeue=False,
    config="a dir/it's.toml",
    program=(),
    directory='runs/a "b"/$SLURM_ARRAY_TASK_ID',
    overrides=("seed=$SLURM_ARRAY_TASK_ID", 'data.args={folder = "d"}'),
    extra=("--qos=high", "--exclusive"),
)
"""A value for every setting."""


def options_of(text: str) -> dict[str, str]:
    """Return the options that sbatch reads: all options before the first command."""
    found = {}
    for line in text.splitlines():
        if line.startswith("#SBATCH "):
            (option,) = shlex.split(line.removeprefix("#SBATCH "))
            name, _, value = option.partition("=")
            assert name not in found, f"{name} must occur once"
            found[name] = value
        elif line and not line.startswith("#"):
            break
    assert text.count("#SBATCH ") == len(found), "all options must precede the first command"
    return found


def ours(text: str) -> str:
    """Return the lines of a script with configuration, directory and arguments."""
    kept = r"^(set -- .*|config=.*|directory=.*)$"
    return "\n".join(re.findall(kept, text, re.MULTILINE))


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_package_and_the_checkout_have_the_same_files():
    assert files(PACKAGED) == files(CHECKOUT)
    assert batch_script.names() == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_a_template_without_settings_is_unchanged(name):
    assert batch_script.text(name).encode() == (CHECKOUT / f"{name}.sbatch").read_bytes()
    assert batch_script.script(name, BatchSettings()) == batch_script.text(name)


@pytest.mark.parametrize("name", TRAINING)
def test_every_template_has_the_options_that_a_job_needs(name):
    options = options_of(batch_script.text(name))
    assert options["--open-mode"] == "append"
    assert {"--nodes", "--ntasks-per-node", "--cpus-per-task", "--time"} <= options.keys()
    assert options["--signal"].removeprefix("B:").startswith("USR1@")
    assert "hpctrain status" in batch_script.text(
        name
    ) or 'status "$directory"' in batch_script.text(name)
    by_srun = re.search(r"^ *srun --mpi=", batch_script.text(name), re.MULTILINE) is not None
    assert by_srun == (name != "mpirun")
    assert ("--no-kill" in options) == (name == "restart")
    assert ("--kill-on-bad-exit=1" in batch_script.text(name)) == (by_srun and name != "restart")


@pytest.mark.parametrize("name", NAMES)
def test_settings_replace_the_lines_of_a_template(name):
    text = batch_script.script(name, SETTINGS)
    assert options_of(batch_script.text(name)) | {
        "--job-name": "big run",
        "--partition": "a,b",
        "--account": "me",
        "--nodes": "7",
        "--ntasks-per-node": "3",
        "--cpus-per-task": "5",
        "--mem": "64G",
        "--time": "1-02:03:04",
        "--gpus-per-node": "3",
        "--output": "out/%x.txt",
        "--array": "0-7%2",
        "--dependency": "afterok:5",
        "--kill-on-invalid-dep": "yes",
        "--no-requeue": "",
        "--qos": "high",
        "--exclusive": "",
        "--requeue": "",
    } == options_of(text) | {"--requeue": ""}
    assert "--requeue" not in options_of(text)
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0


def test_the_test_above_covers_every_setting():
    assert all(getattr(SETTINGS, field.name) is not None for field in fields(BatchSettings))


@pytest.mark.parametrize("name", NAMES)
def test_configuration_directory_and_overrides_reach_the_script(name):
    message = ours(batch_script.script(name, SETTINGS))
    show = '\nprintf "%s\\n" "$config" "$directory" "$@"'
    done = subprocess.run(
        ["bash", "-u", "-c", message + show, "script", "--force"],
        env={"SLURM_ARRAY_TASK_ID": "4", "CONFIG": "no", "RUN_DIRECTORY": "no"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [
        "a dir/it's.toml",
        'runs/a "b"/4',
        "--set=seed=4",
        '--set=data.args={folder = "d"}',
        "--force",
    ]


@pytest.mark.parametrize("requeue", [True, False])
def test_requeue_and_no_requeue_exclude_each_other(requeue):
    options = options_of(batch_script.script("requeue", BatchSettings(requeue=requeue)))
    assert ("--requeue" in options, "--no-requeue" in options) == (requeue, not requeue)


@pytest.mark.parametrize(
    "settings",
    [
        BatchSettings(job_name="two\nlines"),
        BatchSettings(account=""),
        BatchSettings(output='a"b'),
        BatchSettings(extra=("qos=high",)),
        BatchSettings(extra=("-N4",)),
        BatchSettings(extra=("--clusters=a,b",)),
    ],
)
def test_settings_that_sbatch_cannot_read_are_rejected(settings):
    with pytest.raises(ConfigError, match="sbatch"):
        batch_script.script("multi_node", settings)


def test_an_unknown_template_raises_an_error_with_the_known_ones():
    with pytest.raises(ConfigError, match=r"must be one of apptainer, .* got .multi."):
        batch_script.text("multi")


PROGRAM = replace(SETTINGS, program=("python", "it's.py", "--seed", "$SLURM_ARRAY_TASK_ID"))


@pytest.mark.parametrize("name", TRAINING)
def test_a_program_replaces_the_training_and_its_exit_code_is_stored(name):
    text = batch_script.script(name, PROGRAM)
    words = "python 'it'\"'\"'s.py' --seed"
    assert f'program=({words} "$SLURM_ARRAY_TASK_ID")' in text
    assert text.count('"${program[@]}" "') == 1, text
    assert 'echo "$code" >"$directory/exit_code"' in text
    assert "export RUN_DIRECTORY=$directory" in text
    code = re.sub(r"^#.*", "", text, flags=re.MULTILINE)
    assert "hpctrain train" not in code
    assert "$config" not in code


@pytest.mark.parametrize(
    ("limit", "margin_s"), [("1", 15), ("00:04:00", 60), ("20", 120), ("0", 120)]
)
def test_the_signal_margin_is_at_most_a_quarter_of_a_short_job(limit, margin_s):
    options = options_of(batch_script.script("requeue", BatchSettings(time=limit)))
    assert options["--signal"] == f"USR1@{margin_s}"


@pytest.mark.requires("shellcheck")
def test_shellcheck_has_no_findings(tmp_path):
    for name in NAMES:
        (tmp_path / f"{name}.sbatch").write_text(batch_script.script(name, SETTINGS))
    for name in TRAINING:
        (tmp_path / f"{name}-program.sbatch").write_text(batch_script.script(name, PROGRAM))
    line = ["shellcheck", *tmp_path.iterdir(), *PACKAGED.rglob("*.s*")]
    done = ended(line)
    assert not done.stdout, done.stdout
