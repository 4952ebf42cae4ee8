"""Ranks die at random times; the surviving ranks continue in place without loss of samples.

``TEST_KILLS=500`` sets the number of kills, which then take half an hour to an hour.
Seeds that passed are stored in ``build/soak`` and skipped until the package changes.
"""

import hashlib
import json
import os
import random
import re
import sys
from itertools import count
from pathlib import Path

import pytest
import torch

import hpctrain
from hpctrain.cluster.env import RANK_LOST
from hpctrain.launch import mpiexec
from hpctrain.runtime.abort import FAILED
from tests.cluster.vcluster import VirtualCluster
from tests.harness import preload
from tests.horovod.elastic import recovering
from tests.processes import ended

pytestmark = [
    pytest.mark.launches,
    pytest.mark.limit(150),
    pytest.mark.requires("recovery"),
]
FEW = 3
NUM_KILLS = int(os.environ.get("TEST_KILLS", FEW))


def test_launch_fails_if_no_rank_completes_though_the_launcher_returns_0():
    line = [sys.executable, "-m", "hpctrain", "launch", "-n", 2, "--recover", "--"]
    gone = "import os, hpctrain; hpctrain.init(); hpctrain.barrier(); os._exit(0)"
    done = ended([*line, *preload.python(), "-c", gone], timeout=100)
    assert done.returncode == RANK_LOST, done.stderr
    assert "the ranks have not completed: the run has failed" in done.stderr
    assert ended([*line, sys.executable, "-c", "pass"], timeout=100).returncode == 0


def test_a_death_before_mpi_init_ends_all_ranks():
    line = [sys.executable, "-m", "hpctrain", "launch", "-n", 3, "--recover", "--"]
    dies = "import os, signal; os.environ['RANK'] == '2' and os.kill(os.getpid(), signal.SIGKILL)"
    program = [sys.executable, "-c", f"{dies}; import hpctrain; hpctrain.init()"]
    done = ended([*line, *program], timeout=140)
    assert done.returncode == RANK_LOST, done.stderr
    by_ranks = "died before all ranks had started, 2 of 3"
    by_launcher = "rank 2 ended before MPI_Init"
    assert len(re.findall(f"{by_ranks}|{by_launcher}", done.stderr)) == 1, done.stderr


MPI_CRASH = "ompi_comm_revoke_local"
"""Function in which Open MPI 5.0 sometimes crashes when it is told of the death of a rank while
communicators are created; see github.com/sandialabs/Fenix, issue 136."""


def launched(tmp_path, kills, *options, num_ranks=4, spares=0):
    """Launch until the end; return the result of each surviving rank, by rank of the launch."""
    line = [*preload.python(), "-m", "hpctrain", "launch", "-n", num_ranks, "--recover", *options]
    line += ["--spares", spares]
    program = [*preload.python(), recovering.__file__, tmp_path, json.dumps(kills)]
    for _ in range(3):
        done = ended([*line, "--", *program], timeout=400)
        if MPI_CRASH not in done.stderr:
            break
        for file in tmp_path.iterdir():
            file.unlink()
    assert done.returncode == 0, done.stderr
    ends = {int(file.stem): json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    lost = {rank for rank, *_ in kills}
    assert not lost & {*ends}, done.stderr
    assert len(ends) == num_ranks - max(0, len(lost) - spares), done.stderr
    return ends, done.stderr


def check(ends):
    """Check that replicas are equal and that an epoch visits each sample, plus at most a round."""
    first, *others = ends.values()
    weights = torch.tensor(first["weights"])
    assert weights.isfinite().all()
    assert all(end["weights"] == first["weights"] for end in others)
    for visits in first["visits"]:
        assert min(visits) >= 1
        assert sum(visits) - len(visits) < 4 * max(first["sizes"])
    assert first["size"] == len(ends)


def several(seed):
    """Draw the kills of one run: one to three ranks, at the same step or successively."""
    rng = random.Random(seed)
    ranks = rng.sample(range(4), rng.choice((1, 1, 2, 3)))
    if seed % 4 == 3:  # The other ranks die while the survivors create the next world.
        others = [(rank, "remaking", int(10 ** rng.uniform(0, 4))) for rank in ranks[1:]]
        return [(ranks[0], 4, 0), *others]
    steps = rng.choices((1, 3, 5, 7), k=1) * len(ranks) if seed % 2 else (1, 4, 7)
    return [
        (rank, step, rng.choice((0, 0.1, 1, 3, 10)))
        for rank, step in zip(ranks, steps, strict=False)
    ]


NOTES = Path("build/soak/recovery.json")


def passed_before():
    """Return the seeds that passed with this version of the package, for runs of many kills."""
    found = json.loads(NOTES.read_text()) if NUM_KILLS > FEW and NOTES.exists() else {}
    return set(found.get("passed", ())) if found.get("package") == package() else set()


def package():
    """Return a hash of the sources of the package."""
    sources = sorted(Path(hpctrain.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()


def note(seed, num_kills):
    """Record that a seed has passed, and print the progress."""
    if NUM_KILLS > FEW:
        NOTES.parent.mkdir(parents=True, exist_ok=True)
        passed = sorted({*passed_before(), seed})
        NOTES.write_text(json.dumps({"package": package(), "passed": passed}))
        sys.__stderr__.write(f"{num_kills} of {NUM_KILLS} kills survived\n")


@pytest.mark.limit(150 + 15 * NUM_KILLS)
def test_surviving_ranks_continue_in_place_after_random_deaths(tmp_path):
    num_kills, passed = 0, passed_before()
    for seed in count():
        kills, folder = several(seed), tmp_path / str(seed)
        num_kills += len(kills) * (seed in passed)
        if seed in passed and num_kills < NUM_KILLS:
            continue
        folder.mkdir()
        nodes = ("--nodes", 2) if seed % 3 else ()
        ends, message = launched(folder, kills, *nodes)
        check(ends)
        assert "died; the" in message
        num_kills += len(kills) * (seed not in passed)
        note(seed, num_kills)
        if num_kills >= NUM_KILLS:
            break


def test_ranks_may_die_while_survivors_create_the_next_world(tmp_path):
    """Rank 0 dies in the first attempt, a spare in the second; the other spare replaces a rank."""
    kills = [(1, 4, 0), (0, "remaking", 3000), (3, "remaking", 6000)]
    ends, message = launched(tmp_path, kills, num_ranks=3, spares=2)
    check(ends)
    assert "ranks 0-1 of 3 died; the 1 survivors continue, with 1 of the spares" in message
    assert ends[2]["sizes"] == [3, 2]


def test_survivors_continue_after_the_loss_of_a_node_and_rank_0(tmp_path):
    ends, message = launched(tmp_path, [(0, 4, 0), (1, 4, 0)], "--nodes", 2)
    check(ends)
    assert "ranks 0-1 of 4 died; the 2 survivors continue" in message
    assert ends[2]["sizes"] == [4, 2]


@pytest.mark.conformance
@pytest.mark.requires("cluster")
def test_survivors_continue_after_the_loss_of_another_host(tmp_path):
    with VirtualCluster(nodes=2) as cluster:
        kills = json.dumps([(0, 4, 0), (1, 4, 0)])
        program = ["python", recovering.__file__, str(tmp_path), kills]
        env = {mpiexec.RECOVER: "1"}
        done = cluster.run(program, ranks_per_node=[2, 2], env=env, timeout_s=400)
    ends = {int(file.stem): json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert done.returncode == 0, done.stderr
    assert sorted(ends) == [2, 3]
    check(ends)


SHARDED = (
    FAILED,
    "model.named_parameters())",
    'model.named_parameters(), shard="node")',
    "nor a process set, but this optimizer has one of these, with 2 ranks in the next world",
)
RAISES = (
    FAILED,
    "if not ms:",
    "if True:\n            raise ValueError('mine')\n        if not ms:",
    "mine",
)
EXITS = (  # MPI does not report an exit as a death
    RANK_LOST,
    "if not ms:",
    "if True:\n            os._exit(3)\n        if not ms:",
    "",
)


@pytest.mark.parametrize(
    ("code", "old", "new", "message"),
    [SHARDED, RAISES, EXITS],
    ids=["sharded", "an error", "an exit code"],
)
def test_failures_without_recovery_end_all_ranks(tmp_path, monkeypatch, code, old, new, message):
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "5")
    program = Path(recovering.__file__).read_text()
    assert old in program
    (tmp_path / "program.py").write_text(program.replace(old, new))
    line = [sys.executable, "-m", "hpctrain", "launch", "-n", 3, "--recover"]
    kills = json.dumps([(1, 2, 0)])
    done = ended([*line, "--", *preload.python(), tmp_path / "program.py", tmp_path, kills])
    assert done.returncode == code, done.stderr
    assert message in done.stderr
    assert not list(tmp_path.glob("*.json"))
