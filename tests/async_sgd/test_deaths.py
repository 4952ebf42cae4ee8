"""Check deaths of ranks with parameter servers: the remaining ranks continue, or all end."""

import re
import time

import pytest

from hpctrain.cluster.env import RANK_LOST
from hpctrain.launch import mpiexec
from tests.harness import preload
from tests.harness.pace import scaled
from tests.horovod.elastic.test_recovery import MPI_CRASH
from tests.processes import ended
from tests.train.starting import ROOT
from tests.train.test_recovery import trained

pytestmark = [pytest.mark.launches, pytest.mark.limit(120)]


def launched(folder, script, *words):
    """Run a script on ranks; ``words`` are launch options, ``--``, and script arguments."""
    (folder / "script.py").write_text(script)
    options, arguments = words[: words.index("--")], words[words.index("--") + 1 :]
    line = ["-m", "hpctrain", "launch", *options, "--", *preload.python(), "script.py"]
    environ = mpiexec.environment() | {"PYTHONPATH": str(ROOT)}
    line = [*preload.python(), *line, *map(str, arguments)]
    return ended(line, timeout=100, env=environ, cwd=folder)


SCRIPT = """
import os, signal, sys, time
import torch
import hpctrain as hvd

hvd.init()
model = torch.nn.Linear(9, 9)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
make, what, dying = sys.argv[1], sys.argv[2], int(sys.argv[3])
options = {"servers": [0]} if what.startswith("server") else {}
with getattr(hvd, make)(model, optimizer, **options) as method:
    if hvd.rank() == dying == 0 and not method.is_worker:
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGKILL)
    for step in range(40 if method.is_worker else 0):
        time.sleep(0.02)
        if step == 5 and hvd.rank() == dying:
            if what == "raise":
                raise ValueError("mine")
            if what == "exit":
                sys.exit(0)
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        model(torch.ones(4, 9)).sum().backward()
        optimizer.step()
print("whole", flush=True)
"""


@pytest.mark.conformance
@pytest.mark.parametrize(
    ("make", "what", "dying"),
    [
        ("StaleSynchronous", "kill", 1),
        ("StaleSynchronous", "server, kill", 0),
        ("AsyncSGD", "exit", 1),
        ("AsyncSGD", "kill", 1),
        ("StaleSynchronous", "raise", 1),
    ],
)
def test_rank_that_ends_early_ends_the_job(tmp_path, make, what, dying):
    done = launched(tmp_path, SCRIPT, "-n", "3", "--", make, what, dying)
    assert done.returncode != 0
    assert "whole" not in done.stdout


WORKERS = """
import os, signal, sys, threading, time
import torch
import hpctrain as hvd

hvd.init()
name, dying, later_s, alone = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), hvd.rank()
model = torch.nn.Linear(4, 1, bias=False).double()
torch.nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
dense = torch.nn.Linear(1, 1, bias=False).double()
torch.nn.init.zeros_(dense.weight)
averaged = hvd.DistributedOptimizer(torch.optim.SGD(dense.parameters(), lr=1.0))
options = {
    "AsyncSGD": {"staleness_aware": False, "most_ahead": 1},
    "Downpour": {"rate": 1.0, "most_ahead": 1},
}.get(name, {})
with getattr(hvd, name)(model, optimizer, servers=1, **options) as method:
    for step in range(20 if method.is_worker else 0):
        if step == 5 and alone == 1 and later_s:  # it dies when the others know of the first
            threading.Timer(0.3 + later_s, os.kill, (os.getpid(), signal.SIGKILL)).start()
        late = step == 5 and alone == 1 and not later_s  # it pushes its gradient afterwards
        time.sleep(0.9 if late else 0.01)
        if step == 5 and alone == dying:
            time.sleep(0.3)  # another worker has pushed its gradients, and waits at the bound
            os.kill(os.getpid(), signal.SIGKILL)
        model.weight.grad = torch.zeros_like(model.weight)
        model.weight.grad[0, alone] = -1.0
        optimizer.step()
assert all(age >= 0 for age in method.staleness_histogram), method.staleness_histogram
(dense.weight * hvd.rank()).sum().backward()  # it has gone along into the smaller world
averaged.step()
weights = [round(w, 6) for w in model.weight[0].tolist()]
print(f"rank {hvd.rank()} of {hvd.size()}: {weights}, {dense.weight.item()}.")
"""


@pytest.mark.requires("recovery")
@pytest.mark.parametrize(
    ("make", "dead", "left"),
    [
        ("AsyncSGD", 5.0, 20.0),
        pytest.param("StaleSynchronous", 5 / 3, 5 / 3 + 15 / 2, marks=pytest.mark.conformance),
        pytest.param(
            "Downpour",
            sum(step**-0.5 for step in range(1, 6)),
            sum(step**-0.5 for step in range(1, 21)),
            marks=pytest.mark.conformance,
        ),
    ],
)
def test_workers_continue_after_a_death_without_losing_gradients(tmp_path, make, dead, left):
    """Each weight is stepped by one worker alone; the server becomes rank 2, rank 1 rank 0."""
    done = launched(tmp_path, WORKERS, "-n", "4", "--nodes", "2", "--recover", "--", make, 0, 0)
    assert done.returncode == 0, done.stdout + done.stderr
    weights = [round(dead, 6), round(left, 6), round(left, 6), 0.0]
    for rank in range(3):
        assert f"rank {rank} of 3: {weights}, -1.0." in done.stdout, done.stdout


@pytest.mark.conformance
@pytest.mark.requires("recovery")
@pytest.mark.parametrize("later_s", [0.05, 0.15, 0.25])
def test_second_worker_may_die_during_the_recovery(tmp_path, later_s):
    """It has pushed two gradients more than the first one, and waits at the bound."""
    words = "-n", "4", "--nodes", "2", "--recover", "--", "AsyncSGD", 0, later_s
    done = launched(tmp_path, WORKERS, *words)
    # Open MPI 5.0 may crash if a rank dies while the survivors create communicators.
    if "(MPIX_Comm_shrink+" in done.stderr or f"({MPI_CRASH}+" in done.stderr:
        assert done.returncode == RANK_LOST, done.stdout + done.stderr
        return
    assert done.returncode == 0, done.stdout + done.stderr
    found = r"rank (\d) of 2: \[5.0, (\d+).0, 20.0, 0.0\], -0.5\."
    ranks, output = zip(*re.findall(found, done.stdout), strict=True)
    assert sorted(ranks) == ["0", "1"], done.stdout
    assert len({*output}) == 1, output
    assert 7 <= int(output[0]) <= 20  # pushed before it waited for the first worker, or later


@pytest.mark.requires("recovery")
@pytest.mark.parametrize(
    ("what", "dying"),
    [("server, kill", 0), pytest.param("kill", 1, marks=pytest.mark.conformance)],
)
def test_lost_server_is_reported_in_a_run_with_recovery(tmp_path, what, dying):
    done = launched(tmp_path, SCRIPT, "-n", "3", "--recover", "--", "AsyncSGD", what, dying)
    assert done.returncode != 0
    assert "whole" not in done.stdout
    # A rank of the same node may detect the death before MPI does; then the process is named.
    found = rf"\] rank {dying} (of 3|\(process \d+ of this node\)) died"
    assert re.search(found, done.stderr), done.stderr
    assert "restart from the last commit or checkpoint" in done.stderr
    assert "MPI_ERR" not in done.stderr


@pytest.mark.conformance
@pytest.mark.requires("recovery")
@pytest.mark.parametrize("later_s", [0.05, 0.2])
def test_server_that_dies_during_the_recovery_ends_the_job(tmp_path, later_s):
    watch = f"""
def follow():
    while not os.path.exists("dying"):
        time.sleep(0.01)
    time.sleep({later_s})
    os.kill(os.getpid(), signal.SIGKILL)

if alone == 3:  # the server
    threading.Thread(target=follow, daemon=True).start()
"""
    script = WORKERS.replace("options = {\n", f"{watch}\noptions = {{\n", 1)
    kill = "            os.kill(os.getpid(), signal.SIGKILL)\n        model"
    assert kill in script
    script = script.replace(kill, f"            open('dying', 'w').close()\n{kill}")
    words = "-n", "4", "--nodes", "2", "--recover", "--", "AsyncSGD", 0, 0
    done = launched(tmp_path, script, *words)
    assert done.returncode not in (0, 124), done.stdout + done.stderr
    assert "rank 0 of" not in done.stdout
    assert "died, and the other ranks cannot continue" in done.stderr, done.stderr
    assert "MPI_ERR" not in done.stderr


HOGWILD = """
import os, signal, time
import torch
import hpctrain as hvd

hvd.init()
model = torch.nn.Embedding(9, 9, sparse=True)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
with hvd.Hogwild(model, optimizer):
    start = time.monotonic()
    while time.monotonic() - start < 60:
        model(torch.arange(3)).sum().backward()
        optimizer.step()
        if hvd.rank() == 1 and time.monotonic() - start > 0.3:
            os.kill(os.getpid(), signal.SIGKILL)
print("whole")
"""


@pytest.mark.requires("recovery")
def test_ranks_that_never_wait_detect_a_death(tmp_path):
    """A launch with --recover does not end ranks itself."""
    start = time.monotonic()
    done = launched(tmp_path, HOGWILD, "-n", "3", "--recover", "--")
    assert done.returncode != 0
    assert "all ranks end" in done.stderr
    assert "whole" not in done.stdout
    assert time.monotonic() - start < scaled(40)


@pytest.mark.conformance
@pytest.mark.requires("recovery")
def test_run_that_loses_a_rank_resumes_from_its_checkpoint(tmp_path):
    lost, message = trained(tmp_path, "lost", "sync.method=ssp", kills="1:20")
    assert lost[-1]["event"] == "finished"
    assert [r["world_size"] for r in lost if r["event"] in ("started", "resumed")] == [4, 3]
    assert "rank 1 of 4 died; the 3 survivors continue" in message
