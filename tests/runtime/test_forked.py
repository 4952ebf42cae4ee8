"""Forked children may compute and end in any way without effect on parent and launch."""

import sys
from pathlib import Path

import pytest

from hpctrain.launch import mpiexec
from tests.harness import preload
from tests.processes import ended

pytestmark = [pytest.mark.launches, pytest.mark.limit(120)]

ROOT = Path(__file__).parents[2]
MPICH = ROOT / ".venv-mpich/bin/python"

PROGRAM = """
import multiprocessing, os, signal, subprocess, sys, time
{first}
import torch
import hpctrain as hvd

hvd.init()
assert not hvd.should_stop()
size = hvd.size()
total = torch.full((4,), float(hvd.rank()))
model = torch.nn.Linear(2, 1)  # a child frees both at its end
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
model(torch.ones(3, 2) + hvd.rank()).mean().backward()
optimizer.step()

def calculate():
    return (torch.ones(8, 8) @ torch.ones(8, 8)).sum().item() == 512

def refused(call):
    try:
        call()
    except hvd.HpctrainError as error:
        return "forked" in str(error)
    return False

def raises():
    raise ValueError("of the child")

ENDS = {{
    "exit": (lambda: sys.exit(3), 3),
    "raised exit": (lambda: (_ for _ in ()).throw(SystemExit(4)), 4),
    "exception": (raises, 1),
    "at once": (lambda: os._exit(5), 5),
    "shutdown": (lambda: (hvd.shutdown(), sys.exit(6 if refused(hvd.init) else 1)), 6),
    "init": (lambda: sys.exit(9 if refused(hvd.init) else 1), 9),
    "communicates": (lambda: sys.exit(7 if refused(lambda: hvd.allreduce(total)) else 1), 7),
    "calculates": (lambda: sys.exit(8 if calculate() and hvd.size() == size else 1), 8),
    "signal": (lambda: time.sleep(60), -signal.SIGTERM),
}}
for name, (end, code) in ENDS.items():
    children = []
    for again in range(1 + (name == "signal")):
        children.append(os.fork())
        if not children[-1]:
            end()
    for number, child in enumerate(children):
        if name == "signal":
            time.sleep(1.1 * number)  # far enough apart to count as a second signal
            os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == code, name
    assert hvd.allreduce(total).tolist() == [(size - 1) / 2] * 4, name

with multiprocessing.get_context("fork").Pool(2) as pool:  # ends its processes by SIGTERM
    assert pool.map(int, "123") == [1, 2, 3]
subprocess.run(["true"], preexec_fn=os.getpid, check=True)
assert not hvd.should_stop()
if hvd.rank() == 1 and os.fork() == 0:
    sys.stdout.write("the child comes to the end of the program\\n")
else:
    mean = hvd.allreduce(total)
    sys.stdout.write(f"rank {{hvd.rank()}} of {{size}}: {{mean[0].item()}}\\n")
"""


def launched(tmp_path, python, environment, nodes, first):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(first=first))
    ranks = [*preload.python(environment), program]
    line = [python, "-m", "hpctrain", "launch", "-n", "2", "--nodes", nodes, "--", *ranks]
    return ended(line, env=mpiexec.environment() | {"PYTHONPATH": str(ROOT)}, timeout=90)


THIS = (Path(sys.executable), ".venv")


FIRST = "from mpi4py import MPI"  # so that hpctrain finds mpi4py.MPI already imported


@pytest.mark.parametrize(
    ("python", "environment", "nodes", "first"),
    [
        pytest.param(*THIS, 1, "", marks=pytest.mark.conformance, id="one node"),
        pytest.param(*THIS, 2, FIRST, id="two nodes"),
        pytest.param(
            *(MPICH, ".venv-mpich", 1, FIRST),
            marks=[pytest.mark.requires("mpich"), pytest.mark.conformance],
            id="MPICH",
        ),
    ],
)
def test_the_end_of_a_child_does_not_affect_its_parent(
    tmp_path, python, environment, nodes, first
):
    done = launched(tmp_path, python, environment, nodes, first)
    assert done.returncode == 0, done.stderr
    ends = [
        "rank 0 of 2: 0.5\n",
        "rank 1 of 2: 0.5\n",
        "the child comes to the end of the program",
    ]
    assert [done.stdout.count(end) for end in ends] == [1, 1, 1], done.stdout
    # identical messages of several ranks are merged
    assert done.stderr.count("ValueError: of the child") in (1, 2)
