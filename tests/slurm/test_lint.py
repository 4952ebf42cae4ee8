"""``hpctrain doctor --lint`` with Slurm: each of twenty planted mistakes is found."""

from pathlib import Path

import pytest

from hpctrain.cli.doctor import _lint
from tests.launch.slurm.lint.scripts import USERS

pytestmark = [pytest.mark.launches, pytest.mark.requires("slurm"), pytest.mark.limit(120)]

HEALTHY = """\
#!/bin/bash
#SBATCH --job-name=train
#SBATCH --partition=main
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=2
#SBATCH --cpus-per-task=2
#SBATCH --mem=2G
#SBATCH --time=01:00:00
#SBATCH --output=%x-%j.out
source venv/bin/activate
export SRUN_CPUS_PER_TASK=2 OMP_NUM_THREADS=2
srun --mpi=pmix --kill-on-bad-exit=1 python train.py
srun --mpi=pmix --kill-on-bad-exit=1 hpctrain train my.toml
"""
SRUN = "srun --mpi=pmix --kill-on-bad-exit=1 python train.py"
PLANTED = {
    "no srun": (HEALTHY[HEALTHY.index("srun") :], "python train.py\n", "without srun runs once"),
    "tasks that fill nodes unevenly": ("--ntasks-per-node=2", "--ntasks=3", "the last node has"),
    "fewer tasks than nodes": ("--ntasks-per-node=2", "--ntasks=1", "every node|without srun"),
    "more threads than cores": (
        "OMP_NUM_THREADS=2",
        "OMP_NUM_THREADS=16",
        "for --cpus-per-task=2",
    ),
    "MASTER_ADDR": ("export SRUN", "export MASTER_ADDR=localhost SRUN", "one node for all"),
    "RANK": ("export SRUN", "export RANK=$SLURM_PROCID SRUN", "must differ between tasks"),
    "torchrun": (SRUN, "srun -K1 --mpi=pmix torchrun --nproc_per_node=2 train.py", "torchrun"),
    "megabytes": ("--mem=2G", "--mem=100", "is 100 MB"),
    "more memory than a node has": ("--mem=2G", "--mem=900G", "sbatch"),
    "more tasks than a node has cores": ("--ntasks-per-node=2", "--ntasks-per-node=64", "sbatch"),
    "a time that is none": ("--time=01:00:00", "--time=2h", "sbatch"),
    "minutes": ("--time=01:00:00", "--time=24", "must be in minutes"),
    "an output without a folder": ("--output=", "--output=logs/", "but logs does not exist"),
    "a misspelt option": ("--cpus-per-task", "--cpu-per-task", "sbatch"),
    "a partition that is none": (
        "--partition=main",
        "--partition=mian",
        "partition specified: mian",
    ),
    "an environment that is not there": ("venv/bin", "env/bin", "got env/bin/activate"),
    "a configuration that is not there": ("my.toml", "me.toml", "got me.toml"),
    "a script that is not there": ("train.py", "trian.py", "got trian.py"),
    "a launcher without wait": (
        SRUN,
        "mpirun -n 4 python train.py &",
        "ends without waiting for mpirun",
    ),
    "lines of DOS": ("\n", "\r\n", "sbatch"),
}


@pytest.fixture(autouse=True)
def files(login, tmp_path, monkeypatch):  # noqa: ARG001 - its environment
    names = ("my.toml", "a.toml", "train.py", "prepare.py", "bench.py", "venv/bin/activate")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    monkeypatch.setenv("HOME", str(tmp_path))


def output(text):
    path = Path("job.sbatch")
    path.write_text(text, newline="")
    return [each for each in _lint(path) if each.is_wrong]


def test_twenty_planted_mistakes_are_found_and_a_correct_script_has_no_finding():
    assert output(HEALTHY) == []
    assert len(PLANTED) == 20
    missed = {}
    for name, (old, new, words) in PLANTED.items():
        assert old in HEALTHY, name
        found = [f"{each.check}: {each.what}" for each in output(HEALTHY.replace(old, new))]
        if not any(word in line for word in words.split("|") for line in found):
            missed[name] = found
    assert missed == {}


def test_scripts_of_users_have_no_finding_but_rejections_by_sbatch():
    """The simulated cluster is smaller than the clusters that the scripts are for."""
    for name, text in USERS.items():
        assert {each.check for each in output(text)} <= {"sbatch --test-only"}, name
