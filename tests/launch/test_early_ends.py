"""A rank that ends before MPI_Init, where all other ranks wait for it, ends the launch."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpctrain.cluster.env import RANK_LOST
from hpctrain.cluster.process import JOINING, name_of, named
from hpctrain.launch import mpiexec
from hpctrain.launch.rank_processes import below, missing_ranks
from hpctrain.launch.supervise import supervise
from tests.harness.pace import scaled
from tests.launch.started import line, ranks_are_gone

pytestmark = [pytest.mark.launches, pytest.mark.limit(90)]

LIMIT_S = 10.0
KILL, CRASH, LEAVE = (
    "os.kill(os.getpid(), signal.SIGKILL)",  # as the kernel does when memory runs out
    "os.kill(os.getpid(), signal.SIGSEGV)",
    "os._exit(0)",
)
FIND = "from hpctrain.comm.mpi_world import find_world; find_world()"  # as hpctrain.init() does


@pytest.mark.parametrize("end", [KILL, CRASH, LEAVE], ids=["SIGKILL", "SIGSEGV", "exit 0"])
def test_a_rank_that_ends_before_init_ends_the_launch_and_is_named(tmp_path, capfd, end):
    note = f"open({str(tmp_path / 'ended_at')!r}, 'w').write(str(time.time()))"
    last = f"if rank == 1: {note}; sys.stdout.flush(); {end}"
    words = f"{last}\n{FIND}\ntime.sleep(60)"
    code = supervise(line(tmp_path, words), environ=mpiexec.environment()).code
    seconds = time.time() - float((tmp_path / "ended_at").read_text())
    message = capfd.readouterr().err
    assert code == (139 if end == CRASH else RANK_LOST), message
    assert seconds < scaled(LIMIT_S), message
    assert "rank 1" in message
    assert ranks_are_gone(tmp_path)


def test_a_process_has_a_temporary_name_while_it_joins():
    name = Path("/proc/self/comm")
    # bytes, because an additional newline breaks the traces of torch's profiler
    before = name.read_bytes()
    with named(JOINING):
        assert name_of(os.getpid()) == JOINING
    assert name.read_bytes() == before


BELOW = """
import os, subprocess, sys, time
from hpctrain.cluster.process import named
def start(rank, joins):
    code = "import time; from hpctrain.cluster.process import *\\n"
    code += "with named(JOINING if %r else 'works'): print(flush=True); time.sleep(60)" % joins
    sizes = {"OMPI_COMM_WORLD_LOCAL_SIZE": sys.argv[1], "OMPI_COMM_WORLD_SIZE": sys.argv[2]}
    environ = os.environ | sizes | {"OMPI_COMM_WORLD_RANK": str(rank)}
    child = subprocess.Popen([sys.executable, "-c", code], env=environ, stdout=subprocess.PIPE)
    child.stdout.readline()
    return child
ranks = [start(rank, str(rank) in sys.argv[4]) for rank in eval(sys.argv[3])]
print(flush=True)
sys.stdin.read()
for child in ranks: child.kill()
"""


@pytest.mark.parametrize(
    ("local_size", "size", "living", "joining", "gone", "late"),
    [
        (3, 3, [0, 2], "0", "rank 1", "for ranks 1-2"),
        (3, 3, [0], "0", "ranks 1-2", "for ranks 1-2"),
        (3, 3, [0, 2], "", "", ""),  # rank 0 is past MPI_Init, so rank 1 may have finished
        (2, 2, [0, 1], "0", "", "for rank 1"),
        (2, 2, [0, 1], "01", "", ", which all ranks have begun"),
        (2, 4, [0, 1], "01", "", "for other hosts"),
        (2, 4, [0], "0", "1 of 2 ranks on this host", "for other hosts"),
    ],
)
def test_missing_ranks_are_found_from_the_surviving_processes(
    local_size, size, living, joining, gone, late
):
    words = [str(local_size), str(size), str(living), joining]
    with subprocess.Popen(
        [sys.executable, "-c", BELOW, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as launcher:
        launcher.stdout.readline()
        found = missing_ranks(below(launcher.pid))
        assert (found[0], found[1].removeprefix(JOINING).lstrip()) == (gone, late)
        launcher.stdin.close()
