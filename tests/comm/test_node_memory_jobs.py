"""Check jobs whose ranks are killed, or run in containers with a small /dev/shm."""

import os
import sys

import pytest

from hpctrain.cluster.env import RANK_LOST
from tests.processes import AS_ROOT, ended

pytestmark = [
    pytest.mark.launches,
    pytest.mark.limit(150),
    pytest.mark.requires("root", "cluster"),
]

PROGRAM = """
import torch, hpctrain as hvd
from hpctrain.runtime.world import current
hvd.init()
bucket = current().comm.new_bucket(200 << 18, torch.float32)
bucket.flat.fill_(hvd.rank() + 1)
current().comm.allreduce_(bucket).wait()
right = bool((bucket.flat == hvd.size() * (hvd.size() + 1) // 2).all())
print(f"<{hvd.rank()}|{right}|{current().plan.node_memory}>", flush=True)
hvd.shutdown()
"""


def launch(script, *, before="", wrapper=(), after="", **environ):
    """Run the program on two ranks; return the words of each rank and the finished process."""
    line = [*wrapper, sys.executable, str(script)]
    start = [sys.executable, "-m", "hpctrain", "launch", "-n", "2", "--timeout", "60", "--", *line]
    launchers = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_LOCAL", "HYDRA_")
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(launchers)}
    path = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    if before:
        start = ["unshare", "--mount", "sh", "-c", f'{before} && "$@"{after}', "sh", *start]
    done = ended(start, env=inherited | AS_ROOT | path | environ)
    message = [line[1:-1].split("|") for line in done.stdout.splitlines() if line.startswith("<")]
    return sorted(message), done


@pytest.fixture
def script(tmp_path):
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    return file


SMALL_SHM = "mount -t tmpfs -o size=64m tmpfs /dev/shm"


@pytest.mark.conformance
def test_a_container_per_rank_with_a_small_dev_shm_shares_memory_by_socket(script):
    wrapper = ["unshare", "--pid", "--fork", "--mount-proc", "--mount", "--ipc"]
    wrapper += ["sh", "-c", f'{SMALL_SHM} && exec "$@"', "sh"]
    # MPI's own shared memory needs a common /dev/shm.
    message, done = launch(script, wrapper=wrapper, OMPI_MCA_btl="self,tcp")
    assert message == [["0", "True", "memfd"], ["1", "True", "memfd"]], done


KILLED = """
import os, signal, torch, hpctrain as hvd
from mpi4py import MPI
from hpctrain.runtime.world import current
hvd.init()
pids = MPI.COMM_WORLD.allgather(os.getpid())
bucket = current().comm.new_bucket(1 << 18, torch.float32)
for step in range(100):
    current().comm.allreduce_(bucket).wait()
    if step == 50 and hvd.rank() == 0:
        print(f"<{current().plan.node_memory}|>", flush=True)
        for pid in pids[1:] + pids[:1]:
            os.kill(pid, signal.SIGKILL)
"""


def test_killed_job_leaves_no_files(tmp_path):
    script, folder = tmp_path / "killed.py", tmp_path / "tmp"
    script.write_text(KILLED)
    folder.mkdir()
    # Use separate folders, in which no other process makes files.
    before, after = "mount -t tmpfs tmpfs /dev/shm", "; code=$?; ls -A /dev/shm; exit $code"
    message, done = launch(script, before=before, after=after, TMPDIR=str(folder))
    assert message == [["memfd", ""]], done
    assert done.returncode == RANK_LOST
    assert done.stdout.splitlines() == ["<memfd|>"]
    assert not list(folder.iterdir())
