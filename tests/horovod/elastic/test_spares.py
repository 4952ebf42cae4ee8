"""Spares take the place of lost ranks in ``elastic.run``; what they cannot do ends all ranks."""

import pytest

from tests.harness import preload
from tests.horovod.elastic.test_recovery import check, launched
from tests.processes import ended

pytestmark = [pytest.mark.launches, pytest.mark.limit(150), pytest.mark.requires("recovery")]


def test_a_training_that_loses_a_rank_to_a_spare_ends_as_one_that_loses_none(tmp_path):
    """One spare of both runs is never needed, and ends with 0; the lost rank is that of the state."""
    (tmp_path / "whole").mkdir()
    (tmp_path / "lost").mkdir()
    whole, _ = launched(tmp_path / "whole", [], spares=1, num_ranks=3)
    lost, said = launched(tmp_path / "lost", [(0, 4, 0)], spares=2, num_ranks=3)
    assert [sorted(whole), sorted(lost)] == [[0, 1, 2], [1, 2, 3]]
    assert "rank 0 of 3 died; the 2 that are left go on, with 1 of the spares" in said
    assert all(end["sizes"] == [3, 3] for end in lost.values())
    assert {str(end["weights"]) for end in lost.values()} == {str(whole[0]["weights"])}
    assert {str(end["visits"]) for end in lost.values()} == {str(whole[0]["visits"])}


def test_a_world_keeps_its_size_while_there_are_spares_and_shrinks_then(tmp_path):
    """The spare, which is in the third place, dies last; whoever is left has the state."""
    ends, _ = launched(tmp_path, [(1, 4, 0), (4, 10, 0)], "--nodes", 2, spares=1)
    check(ends)
    assert sorted(ends) == [0, 2, 3]
    assert ends[0]["sizes"] == [4, 4, 3]


PROGRAM = """
import os, signal, sys, threading, time
from mpi4py import MPI
import hpctrain as hvd
from hpctrain import elastic

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def is_spare():
    return not hvd.current().is_first

hvd.init()
number = MPI.COMM_WORLD.rank
BEFORE

@elastic.run
def train(state):
    INSIDE
    while state.step < 6:
        state.step += 1
        if state.step == 3 and number == 1:
            die()
        hvd.barrier()
        state.commit()

train(elastic.ObjectState(step=0))
AFTER
"""
RULE = "with --spares a program calls elastic.run once"
REFUSED = {
    "a named operation": ("if is_spare(): hvd.barrier()", "", "", RULE),
    "a call": ("if is_spare(): hvd.current().comm.barrier()", "", "", "got rank 0: broadcast of"),
    "twice": ("number = 0", "", "train(elastic.ObjectState(step=0))", "got elastic.run"),
    "process sets": ("hvd.init(process_sets=[hvd.ProcessSet([0])])", "", "", "add_process_set"),
    "no state": (
        "if is_spare(): time.sleep(1.5)",
        "if number == 0: threading.Timer(0.7, die).start()",
        "",
        "all ranks that had the state are lost, and 1 are left",
    ),
    "mpi": (
        "",
        "ours = hvd.current().ranks.Dup()\n"
        "    assert ours.allreduce(1) == hvd.size()\n"
        "    ours.Free()\n"
        "    if is_spare(): MPI.COMM_WORLD.barrier()",
        "",
        "hpctrain.current().ranks.Dup()",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_spare_cannot_do_ends_all_ranks(tmp_path, what):
    before, inside, after, said = REFUSED[what]
    program = PROGRAM.replace("BEFORE", before).replace("INSIDE", inside).replace("AFTER", after)
    (tmp_path / "program.py").write_text(program)
    line = [*preload.python(), "-m", "hpctrain", "launch", "-n", 2, "--recover", "--spares", 1]
    done = ended([*line, "--", *preload.python(), tmp_path / "program.py"], timeout=60)
    assert done.returncode not in (0, 124), done.stderr
    assert said in done.stderr
