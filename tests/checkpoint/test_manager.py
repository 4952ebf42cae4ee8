"""Check background checkpoints: saved values are exact, and failures keep the last checkpoint."""

import threading

import pytest
import torch

from hpctrain.checkpoint import manager as module
from hpctrain.checkpoint import saving
from hpctrain.checkpoint.background import StateCopy
from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.checkpoint.manager import Manager
from hpctrain.comm.threaded import ThreadedCommunicator
from hpctrain.core.errors import CheckpointError, ConfigError, MismatchError
from tests.checkpoint.managed import loaded_value, managed, state, steps_in
from tests.checkpoint.states import same
from tests.full_disk import largest_file

BOTH = pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])


def save_and_wait(manager, values, step):
    manager.save(values, step)
    manager.wait()


@pytest.mark.ranks(1, 2, 3, 4)
@BOTH
def test_last_saved_checkpoint_is_loaded(comm, root, background):
    with managed(root, comm, background=background) as manager:
        assert manager.latest() is None
        assert manager.load_latest() is None
        for step in (1, 2, 3):
            manager.save(state(step), step, {"rank": comm.rank}, {"run": "x"})
        manager.wait()
        assert manager.latest() == root / "step-00000003"
        loaded = manager.load_latest()
        assert loaded.private[comm.rank] == {"rank": comm.rank}
        assert loaded.facts == {"run": "x"}
        assert loaded_value(manager) == 3
        assert steps_in(root) == [2, 3]


@pytest.mark.ranks(1, 2)
@BOTH
@pytest.mark.parametrize("allowed", [0, 1, 2], ids=["writing", "appearing", "tidying"])
def test_manager_changes_nothing_after_its_guard_raises(comm, root, background, allowed):
    looks = iter([True] * allowed)

    def guard():
        if not next(looks, False):
            raise CheckpointError("another job has it")

    with managed(root, comm) as of_another_job:
        of_another_job.save(state(9), 9, wait=True)
    room = "step-00000004.another.part"  # the other job writes to this directory
    if comm.rank == 0:
        (root / room).mkdir()
    comm.barrier()
    with (
        managed(root, comm, background=background, guard=guard, keep=1) as manager,
        pytest.raises(CheckpointError, match="another job has it"),
    ):
        manager.save(state(4), 4, wait=True)
    comm.barrier()
    there = {0: [room], 1: [], 2: ["step-00000004"]}[allowed]
    assert sorted(path.name for path in root.iterdir()) == [*there, "step-00000009"]


@pytest.mark.ranks(1, 2, 3, 4)
def test_split_tensors_and_pieces_are_restored_bitwise(comm, root):
    generator = torch.Generator().manual_seed(0)
    numels = [500_000, 3, 700_001, 0, 1, 300_000]
    whole = {str(i): torch.randn(n, generator=generator) for i, n in enumerate(numels)}
    whole["square"] = torch.randn(801, 800, generator=generator).T
    shard = Shard((2 * comm.size, 3), (2 * comm.rank, 0), (2, 3))
    piece = TensorPiece(torch.full((2, 3), float(comm.rank)), shard)
    with managed(root, comm) as manager:
        for step in (1, 2):
            manager.save({"whole": whole, "piece": piece}, step, {"mine": whole["4"] + comm.rank})
        manager.wait()
        loaded = manager.load_latest()
    for name, tensor in whole.items():
        assert torch.equal(loaded.state["whole"][name], tensor)
    assert loaded.state["piece"][:, 0].tolist() == [r for r in range(comm.size) for _ in "ab"]
    assert torch.equal(loaded.private[comm.rank]["mine"], whole["4"] + comm.rank)


@pytest.mark.ranks(1, 2, 3)
def test_training_continues_while_a_checkpoint_is_written(comm, root, monkeypatch):
    go_on, save = threading.Event(), saving.write

    def slow_save(*args, **kwargs):
        assert go_on.wait(60)
        return save(*args, **kwargs)

    monkeypatch.setattr(saving, "write", slow_save)
    with managed(root, comm) as manager:
        values = state(7)
        manager.save(values, 7)
        values["w"].zero_()  # a training step changes the state
        total = comm.allreduce(torch.ones(1000))  # and communicates with other ranks
        assert total.unique().tolist() == [comm.size]
        assert not root.exists()
        go_on.set()
        manager.wait()
        assert loaded_value(manager) == 7


@pytest.mark.ranks(2, 3)
def test_steps_and_saves_on_two_communicators_do_not_interfere(comm, root):
    with managed(root, ThreadedCommunicator(comm), keep=1) as manager:
        for step in range(1, 16):
            manager.save(state(step, numel=10_000), step)
            manager._comm.allreduce(torch.ones(5000))
        manager.wait()
        assert loaded_value(manager) == 15
    assert steps_in(root) == [15]


@pytest.mark.ranks(1, 2, 3)
@BOTH
def test_full_disk_raises_on_every_rank_and_keeps_the_last_checkpoint(comm, root, background):
    with managed(root, comm, background=background) as manager:
        manager.save(state(1), 1, wait=True)
        with largest_file(1000), pytest.raises(CheckpointError, match="step-00000002: File too"):
            save_and_wait(manager, state(2, numel=100_000), 2)
        assert loaded_value(manager) == 1
        manager.wait()  # the error is raised only once
        manager.save(state(2, numel=100_000), 2, wait=True)
        assert loaded_value(manager) == 2


@pytest.mark.ranks(1, 2)
def test_next_save_raises_the_failure_of_the_one_before_and_is_still_due(comm, root):
    with managed(root, comm, every=10) as manager:
        with largest_file(1000):
            manager.save(state(10, numel=100_000), 10)
            with pytest.raises(CheckpointError, match=r"save of step 10 failed: .*step-00000010"):
                manager.save(state(20, numel=100_000), 20)
        assert manager.latest() is None
        assert manager.due(21)
        manager.save(state(21), 21)
        manager.wait()
        assert not manager.due(22)
        assert loaded_value(manager) == 21


@pytest.mark.ranks(2, 3)
def test_error_of_a_save_names_its_step_in_any_call(comm, root):
    with managed(root, comm) as manager:
        manager.save(state(7), 7, wait=True)
        manager.save({"w": torch.full((3,), float(comm.rank))}, 10)
        assert loaded_value(manager) == 7
        with pytest.raises(CheckpointError, match=r"^the save of step 10 failed: tensors that"):
            manager.save(state(20), 20)


@pytest.mark.ranks(1, 2)
def test_the_last_save_is_written_after_a_failed_save(comm, root, caplog):
    with managed(root, comm) as manager:
        with largest_file(50_000):
            manager.save(state(10, numel=100_000), 10)
            manager.save(state(10), 10, wait=True)
        assert ("step-00000010: File too large" in caplog.text) == (comm.rank == 0)
        assert loaded_value(manager) == 10


@pytest.mark.ranks(1, 2)
def test_state_that_one_rank_cannot_save_raises_on_all(comm, root):
    with managed(root, comm) as manager:
        bad = object() if comm.rank == comm.size - 1 else 1
        with pytest.raises(CheckpointError, match="value"):
            manager.save(state(1), 1, {"value": bad}, wait=True)
        manager.save(state(2), 2, wait=True)
        assert loaded_value(manager) == 2


@pytest.mark.ranks(2, 3)
def test_checkpoint_is_written_synchronously_without_threads_in_mpi(
    comm, root, monkeypatch, caplog
):
    monkeypatch.setattr(
        "hpctrain.checkpoint.background.calls_from_threads", lambda: comm.rank == 0
    )
    with managed(root, comm) as manager:
        manager.save(state(1), 1)
        assert steps_in(root) == [1]
    assert ("one thread only" in caplog.text) == (comm.rank == 0)


@pytest.mark.ranks(1, 2, 3)
@BOTH
def test_a_closed_manager_saves_nothing_and_still_loads(comm, root, background):
    with managed(root, comm, background=background) as manager:
        manager.save(state(1), 1)
    for wait in (False, True):
        with pytest.raises(CheckpointError, match=r"a Manager must be open .* create a new one"):
            manager.save(state(2), 2, wait=wait)
    assert steps_in(root) == [1]
    assert loaded_value(manager) == 1
    manager.close()


@pytest.mark.ranks(1, 3)
@BOTH
def test_figures_report_costs(comm, root, background):
    with managed(root, comm, background=background) as manager:
        assert manager.figures() is None
        manager.save(state(1, numel=10_000), 1, wait=True)
        figures = manager.figures()
        assert (figures.step, figures.num_bytes) == (1, 40_000)
        assert figures.write_s > 0
        assert figures.stall_s > 0
        assert figures.bytes_per_s == pytest.approx(40_000 / figures.write_s)
        assert len(set(comm.allgather_object(figures))) == 1


@pytest.mark.ranks(1, 2, 3)
def test_the_clock_of_rank_0_decides(comm, root, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with managed(root, comm, every="10min") as manager:
        now[0] = 599.0
        assert not manager.due(1)
        now[0] = 600.0
        assert manager.due(1) == (comm.rank == 0)
        manager.save(state(1), 1)
        assert not manager.due(2)
    with managed(root, comm, every="auto", mtbf="1h") as manager:
        assert manager.due(1) == (comm.rank == 0)


@pytest.mark.parametrize(
    "options",
    [
        {"keep": 0},
        {"keep_best": -1},
        {"every": "auto"},
        {"every": 0},
        {"every": "auto", "mtbf": "soon"},
    ],
)
def test_invalid_options_of_a_manager_are_rejected(comm, root, options):
    with pytest.raises(ConfigError):
        Manager(root, comm, **options)


def mixed(value):
    weights = torch.full((3, 4), value).requires_grad_()
    return {
        "model": {"w": weights, "b": torch.tensor(value).bfloat16()},
        "pieces": [TensorPiece(torch.full((2,), value), Shard((4,), (2,), (2,)))],
        "turned": torch.arange(6.0).view(2, 3).T + value,
        "plain": (1, value, "text", None, b"bytes"),
    }


def tensors(taken):
    return [
        *taken["model"].values(),
        taken["pieces"][0].tensor,
        taken["turned"],
    ]


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("name", "values"), [("background", (True, False)), ("every", (2, "10min")), ("keep", (1, 2))]
)
def test_managers_with_different_options_are_refused_on_every_rank(comm, root, name, values):
    with pytest.raises(MismatchError, match=f"argument of Manager must be .* {name} {values[0]}"):
        Manager(root, comm, **{name: values[comm.rank == 1]})


def test_snapshot_reuses_memory_and_is_independent_of_the_state():
    snapshot, original = StateCopy(), mixed(1.0)
    taken = snapshot.take(original)
    places = [tensor.data_ptr() for tensor in tensors(taken)]
    with torch.no_grad():
        for tensor in tensors(original):
            tensor.zero_()
    assert same(taken, mixed(1.0))
    assert not any(tensor.requires_grad for tensor in tensors(taken))
    taken = snapshot.take(mixed(2.0))
    assert [tensor.data_ptr() for tensor in tensors(taken)] == places
    assert same(taken, mixed(2.0))


def test_memory_follows_the_state():
    snapshot = StateCopy()
    snapshot.take({"a": torch.zeros(1000), "b": torch.zeros(10)})
    assert snapshot.num_bytes == 4040
    taken = snapshot.take({"b": torch.ones(20), "c": torch.ones(5).double()})
    assert snapshot.num_bytes == 80 + 40
    assert torch.equal(taken["b"], torch.ones(20))
    assert torch.equal(taken["c"], torch.ones(5).double())


def test_ranks_divide_the_copy_of_replicated_state():
    large = torch.randn(1001, 1000)
    piece = TensorPiece(torch.ones(7), Shard((21,), (7,), (7,)))
    original = {"large": large, "small": torch.ones(3), "one": torch.tensor(1), "piece": piece}
    snapshots = [StateCopy(rank, 3) for rank in range(3)]
    taken = [snapshot.take(original) for snapshot in snapshots]
    for copy in taken:
        assert torch.equal(copy["piece"].tensor, piece.tensor)
        assert copy["large"].shape == large.shape
    sizes = [snapshot.num_bytes - piece.tensor.nbytes for snapshot in snapshots]
    assert sum(sizes) == large.nbytes + 12 + 8
    assert max(sizes) - min(sizes) <= 8000
