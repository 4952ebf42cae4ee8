"""Ranks die at any instant; those that are left go on in place, and lose nothing.

``HPCTRAIN_TEST_KILLS=500`` makes it so many kills, half an hour to an hour; what has passed is
kept in ``build/soak`` until the package changes, and not done again.
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
FEW = 6
NUM_KILLS = int(os.environ.get("HPCTRAIN_TEST_KILLS", FEW))


def test_a_launcher_that_says_0_is_not_believed_where_no_rank_has_come_to_its_end():
    line = [sys.executable, "-m", "hpctrain", "launch", "-n", 2, "--recover", "--"]
    gone = "import os, hpctrain; hpctrain.init(); hpctrain.barrier(); os._exit(0)"
    done = ended([*line, sys.executable, "-c", gone], timeout=100)
    assert done.returncode == RANK_LOST, done.stderr
    assert "the ranks have not completed: the run has failed" in done.stderr
    assert ended([*line, sys.executable, "-c", "pass"], timeout=100).returncode == 0


def test_where_a_rank_dies_before_mpi_has_begun_all_end():
    line = [sys.executable, "-m", "hpctrain", "launch", "-n", 3, "--recover", "--"]
    dies = "import os, signal; os.environ['RANK'] == '2' and os.kill(os.getpid(), signal.SIGKILL)"
    program = [sys.executable, "-c", f"{dies}; import hpctrain; hpctrain.init()"]
    done = ended([*line, *program], timeout=140)
    assert done.returncode == RANK_LOST, done.stderr
    by_ranks = "died before all ranks had started, 2 of 3"
    by_launcher = "rank 2 ended before MPI_Init"
    assert len(re.findall(f"{by_ranks}|{by_launcher}", done.stderr)) == 1, done.stderr


def launched(tmp_path, kills, *options, num_ranks=4, spares=0):
    """Run to the end; return what each rank that is left has found there, by its first number."""
    line = [*preload.python(), "-m", "hpctrain", "launch", "-n", num_ranks, "--recover", *options]
    line += ["--spares", spares]
    program = [*preload.python(), recovering.__file__, tmp_path, json.dumps(kills)]
    done = ended([*line, "--", *program], timeout=400)
    assert done.returncode == 0, done.stderr
    ends = {int(file.stem): json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    lost = {rank for rank, *_ in kills}
    assert not lost & {*ends}, done.stderr
    assert len(ends) == num_ranks - max(0, len(lost) - spares), done.stderr
    return ends, done.stderr


def check(ends):
    """The replicas are equal, and each sample was taken once per epoch, but to fill a round."""
    first, *others = ends.values()
    weights = torch.tensor(first["weights"])
    assert weights.isfinite().all()
    assert all(end["weights"] == first["weights"] for end in others)
    for visits in first["visits"]:
        assert min(visits) >= 1
        assert sum(visits) - len(visits) < 4 * max(first["sizes"])
    assert first["size"] == len(ends)


def several(seed):
    """Draw kills of one run: one, two at once, or one after the other, down to the last rank."""
    rng = random.Random(seed)
    ranks = rng.sample(range(4), rng.choice((1, 1, 2, 3)))
    if seed % 4 == 3:  # the others die while those that are left make their world
        others = [(rank, "remaking", int(10 ** rng.uniform(0, 4))) for rank in ranks[1:]]
        return [(ranks[0], 4, 0), *others]
    steps = rng.choices((1, 3, 5, 7), k=1) * len(ranks) if seed % 2 else (1, 4, 7)
    return [
        (rank, step, rng.choice((0, 0.1, 1, 3, 10)))
        for rank, step in zip(ranks, steps, strict=False)
    ]


NOTES = Path("build/soak/recovery.json")


def passed_before():
    """Return the seeds that the same package has passed, of a run of many kills."""
    found = json.loads(NOTES.read_text()) if NUM_KILLS > FEW and NOTES.exists() else {}
    return set(found.get("passed", ())) if found.get("package") == package() else set()


def package():
    """Return what tells one state of the package from another."""
    sources = sorted(Path(hpctrain.__file__).parent.rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in sources)).hexdigest()


def note(seed, num_kills):
    """Keep that a seed has passed, and say how far it is."""
    if NUM_KILLS > FEW:
        NOTES.parent.mkdir(parents=True, exist_ok=True)
        passed = sorted({*passed_before(), seed})
        NOTES.write_text(json.dumps({"package": package(), "passed": passed}))
        sys.__stderr__.write(f"{num_kills} of {NUM_KILLS} kills survived\n")


@pytest.mark.limit(150 + 15 * NUM_KILLS)
def test_ranks_that_are_left_go_on_in_place_wherever_the_others_die(tmp_path):
    num_kills, passed = 0, passed_before()
    for seed in count():
        kills, folder = several(seed), tmp_path / str(seed)
        num_kills += len(kills) * (seed in passed)
        if seed in passed and num_kills < NUM_KILLS:
            continue
        folder.mkdir()
        nodes = ("--nodes", 2) if seed % 3 else ()
        ends, said = launched(folder, kills, *nodes)
        check(ends)
        assert "died; the" in said
        num_kills += len(kills) * (seed not in passed)
        note(seed, num_kills)
        if num_kills >= NUM_KILLS:
            break


def test_more_ranks_may_die_while_those_that_are_left_make_their_world(tmp_path):
    """Rank 0 dies in the first try, a spare in the second; the other spare takes a place."""
    kills = [(1, 4, 0), (0, "remaking", 3000), (3, "remaking", 6000)]
    ends, said = launched(tmp_path, kills, num_ranks=3, spares=2)
    check(ends)
    assert "ranks 0-1 of 3 died; the 1 that are left go on, with 1 of the spares" in said
    assert ends[2]["sizes"] == [3, 2]


def test_a_whole_node_and_rank_0_may_be_lost(tmp_path):
    ends, said = launched(tmp_path, [(0, 4, 0), (1, 4, 0)], "--nodes", 2)
    check(ends)
    assert "ranks 0-1 of 4 died; the 2 that are left go on" in said
    assert ends[2]["sizes"] == [4, 2]


@pytest.mark.requires("cluster")
def test_the_ranks_of_another_machine_may_be_lost(tmp_path):
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
    "nor a process set, but this one does, with 2 ranks in the next world",
)
RAISES = (
    FAILED,
    "if not ms:",
    "if True:\n            raise ValueError('mine')\n        if not ms:",
    "mine",
)
EXITS = (  # MPI does not take it for dead
    RANK_LOST,
    "if not ms:",
    "if True:\n            os._exit(3)\n        if not ms:",
    "",
)


@pytest.mark.parametrize(
    ("code", "old", "new", "said"),
    [SHARDED, RAISES, EXITS],
    ids=["sharded", "an error", "an exit code"],
)
def test_what_cannot_go_on_ends_all_ranks(tmp_path, monkeypatch, code, old, new, said):
    monkeypatch.setenv("HPCTRAIN_TIMEOUT", "5")
    program = Path(recovering.__file__).read_text()
    assert old in program
    (tmp_path / "program.py").write_text(program.replace(old, new))
    line = [sys.executable, "-m", "hpctrain", "launch", "-n", 3, "--recover"]
    kills = json.dumps([(1, 2, 0)])
    done = ended([*line, "--", sys.executable, tmp_path / "program.py", tmp_path, kills])
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert not list(tmp_path.glob("*.json"))
