"""The world: ranks, initialization, shutdown and initialization again."""

import os
import re
import sys
import time
from pathlib import Path

import pytest
import torch

import hpctrain
from hpctrain.core.errors import ConfigError, NotInitializedError, RankLostError
from hpctrain.runtime.world import current
from tests.harness import preload
from tests.harness.pace import scaled
from tests.processes import ended

SIZES = pytest.mark.ranks(1, 2, 3, 4)


@SIZES
def test_ranks_are_those_of_mpi(world, hvd):
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size)
    assert (hvd.local_rank(), hvd.local_size()) == (world.rank, world.size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)


@SIZES
def test_declared_nodes_have_local_and_cross_ranks(world):
    hpctrain.init(ranks_per_node=2)
    nodes, last = -(-world.size // 2), world.size % 2
    assert hpctrain.local_rank() == world.rank % 2
    assert hpctrain.local_size() == (1 if last and world.rank == world.size - 1 else 2)
    assert hpctrain.cross_rank() == world.rank // 2
    assert hpctrain.cross_size() == (nodes - last if hpctrain.local_rank() else nodes)
    assert hpctrain.is_homogeneous() == (world.size in {1, 2, 4})
    hpctrain.shutdown()


@SIZES
def test_init_is_idempotent_and_works_again_after_shutdown(world):
    for _ in range(2):
        hpctrain.init()
        here = current()
        hpctrain.init()
        assert current() is here
        assert torch.get_num_threads() == here.plan.threads
        assert set(world.allgather(here.plan)) == {here.plan}
        assert hpctrain.is_initialized()
        hpctrain.shutdown()
        hpctrain.shutdown()
        assert not hpctrain.is_initialized()


@pytest.mark.ranks(1)
def test_calls_before_init_raise_an_error():
    for needs in (
        hpctrain.rank,
        hpctrain.barrier,
        hpctrain.stop_timeline,
        lambda: hpctrain.start_timeline("t.json"),
        lambda: hpctrain.allreduce(torch.zeros(1)),
    ):
        with pytest.raises(NotInitializedError, match=r"hpctrain\.init"):
            needs()


@pytest.mark.ranks(1)
def test_settings_are_checked(monkeypatch):
    with pytest.raises(ConfigError, match="ranks_per_node must be at least 1, got 0"):
        hpctrain.init(ranks_per_node=0)
    with pytest.raises(ConfigError, match="engine must be one of hpctrain, horovod, got 'gloo'"):
        hpctrain.init(engine="gloo")
    monkeypatch.setenv("HPCTRAIN_OVERLAP", "sometimes")
    with pytest.raises(ConfigError, match="HPCTRAIN_OVERLAP must be one of auto, thread"):
        hpctrain.init()


def unlaunched():
    """Return the environment without variables of a launcher."""
    launchers = ("OMPI_", "PMIX_", "PRTE_", "PMI_", "MPI_LOCAL", "HYDRA_", "SLURM_")
    return {k: v for k, v in os.environ.items() if not k.startswith(launchers)}


def init_alone(
    environ,
    code="import hpctrain; hpctrain.init(); print('size', hpctrain.size())",
    python=preload.python,
):
    """Run ``code`` in a process without a launcher."""
    return ended([*python(), "-c", code], env=unlaunched() | environ)


@pytest.mark.launches
def test_a_launcher_of_another_mpi_is_an_error_at_init():
    done = init_alone({"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"})
    assert done.returncode != 0
    assert re.search(r"srun.* started 4 ranks", done.stderr.replace("\n", " "))
    assert "libmpi" in done.stderr
    assert "--mpi=pm" in done.stderr


SCRIPT = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}


@pytest.mark.launches
def test_an_unconnected_rank_of_a_job_is_an_error_at_init_unless_it_may_be_alone():
    done = init_alone(SCRIPT)
    assert done.returncode != 0, done.stdout
    last = done.stderr.splitlines()[-1]
    remedies = ("hpctrain launch -n 4", "`srun", "HPCTRAIN_ALONE=1")
    for text in ("SLURM_NTASKS=4", "would train alone", *remedies):
        assert text in last
    assert "Traceback" not in done.stderr
    # the environment of a shell started by salloc
    shell = {name: text for name, text in SCRIPT.items() if name != "SLURM_PROCID"}
    assert init_alone(shell).stderr == done.stderr
    assert init_alone(SCRIPT | {"HPCTRAIN_ALONE": "1"}).stdout == "size 1\n"
    code = "import sys; sys.ps1 = '>>> '; import hpctrain; hpctrain.init(); print(hpctrain.size())"
    typed = init_alone(SCRIPT, code)  # interactive, as in a notebook
    assert typed.stdout == "1\n"
    assert typed.stderr.count("this process trains alone, but this Slurm job is for 4 ranks") == 1


@pytest.mark.launches
def test_torchrun_is_an_error_with_a_remedy_in_one_line(tmp_path):
    program = tmp_path / "train.py"
    program.write_text("import hpctrain; hpctrain.init(); print('trained')")
    run = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", str(program)]
    done = ended(run, env=unlaunched())
    assert done.returncode != 0
    assert "trained" not in done.stdout
    output = (
        "hpctrain: all ranks of a launch must form one world by MPI, but torchrun started 2 ranks"
    )
    assert done.stderr.count(output) in (1, 2)  # torchrun may be slow to end the other process
    assert "LaunchError" not in done.stderr
    # no traceback of the program
    assert str(program) not in done.stderr.partition("ChildFailedError")[0]


@pytest.mark.launches
def test_a_world_of_one_rank_needs_no_mpi(tmp_path):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("raise ImportError('no MPI here')")
    alone = {"PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    # not preloaded, because preloaded processes have imported mpi4py
    done = init_alone(alone, python=lambda: [sys.executable])
    assert done.stdout.strip() == "size 1", done.stderr


@pytest.mark.ranks(2, 3, 4)
def test_a_list_of_ranks_is_a_world_in_the_order_of_the_list(world):
    chosen = [1, 0]
    if world.rank in chosen:
        hpctrain.init(chosen)
        assert (hpctrain.rank(), hpctrain.size()) == (1 - world.rank, 2)
        assert hpctrain.allgather_object(world.rank) == chosen
        hpctrain.shutdown()
    else:
        with pytest.raises(ConfigError, match=f"rank {world.rank} is not in 0-1"):
            hpctrain.init(chosen)
        assert not hpctrain.is_initialized()


@SIZES
def test_a_world_of_one_rank_among_many(world):
    hpctrain.init([world.rank])
    assert (hpctrain.rank(), hpctrain.size()) == (0, 1)
    assert hpctrain.allreduce(torch.ones(1), op=hpctrain.Sum).item() == 1
    hpctrain.shutdown()


@SIZES
def test_worlds_of_different_communicators_work_concurrently(world):
    part = world.Split(world.rank % 2, -world.rank)
    members = part.allgather(world.rank)
    hpctrain.init(part)
    assert (hpctrain.rank(), hpctrain.size()) == (part.rank, part.size)
    assert hpctrain.allgather_object(world.rank) == members
    assert hpctrain.global_process_set.mpi_comm is part
    hpctrain.shutdown()
    assert part.allgather(world.rank) == members  # shutdown does not free the user's communicator
    part.Free()


@SIZES
def test_an_invalid_world_is_rejected(world):
    size = world.size
    for ranks in ([size], [0, 0], [-1, 0]):
        with pytest.raises(ConfigError, match=f"must be from 0 to {size - 1}, each once"):
            hpctrain.init(ranks)
    for other in ("all", 3, [0.0], [None]):
        with pytest.raises(ConfigError, match="must be None, a list of ranks or an mpi4py"):
            hpctrain.init(other)
    assert not hpctrain.is_initialized()
    hpctrain.init([])  # Horovod: an empty list means all ranks
    assert hpctrain.size() == size
    hpctrain.shutdown()


@SIZES
def test_operations_that_are_not_awaited_do_not_delay_shutdown(world):
    hpctrain.init()
    if world.rank == 0:
        handle = hpctrain.allreduce_async(torch.ones(1), name="of rank 0 alone")
    hpctrain.shutdown()
    if world.rank == 0 and world.size > 1:
        with pytest.raises(hpctrain.HorovodInternalError, match="shut down"):
            hpctrain.synchronize(handle)


@pytest.mark.ranks(3)
@pytest.mark.parametrize("alone", ["join", "barrier"])
def test_shutdown_is_immediate_after_an_error_caught_on_one_rank(hvd, alone):
    start = time.monotonic()
    if hvd.rank() == hvd.size() - 1:
        with pytest.raises(RankLostError, match="left the program"):
            getattr(hvd, alone)()
    hvd.shutdown()
    assert time.monotonic() - start < scaled(8)  # no wait for operations of a broken controller
