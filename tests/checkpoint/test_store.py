"""Check that any number of ranks loads the saved bits of any number of ranks, or all raise."""

import itertools
import os
import shutil
from pathlib import Path

import pytest
import torch
from mpi4py import MPI
from safetensors.torch import load_file
from torch.testing._internal.two_tensor import TwoTensor

from hpctrain.checkpoint import saving
from hpctrain.checkpoint.format import tensor_file
from hpctrain.checkpoint.format.manifest import CheckpointManifest, file_name
from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.checkpoint.loading import check, load
from hpctrain.checkpoint.manager import Manager
from hpctrain.checkpoint.saving import save
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.states import of_every_kind, same
from tests.checkpoint.test_hostile import manifest_of
from tests.comm.conftest import PATHS, SAME, connected
from tests.full_disk import largest_file

SIZES = pytest.mark.ranks(1, 2, 3, 4)
ROWS, COLS = 50, 40


KINDS = [kind for kind in ("flat MPI", "one node", "nodes of two") if kind not in SAME]


@pytest.fixture(params=KINDS[:1] if MPI.COMM_WORLD.size == 1 else KINDS)
def comm(request):
    with connected(PATHS[request.param]) as made:
        yield made.comm


@pytest.fixture
def folder(world, tmp_path):
    """Return a folder that all ranks can access."""
    return Path(world.bcast(str(tmp_path)))


@pytest.fixture
def small_blocks(monkeypatch):
    """Let small tensors have many blocks, and split them."""
    for module in ("format.tensor_file", "format.manifest", "loading", "block_reader"):
        monkeypatch.setattr(f"hpctrain.checkpoint.{module}.BLOCK_BYTES", 256)
    monkeypatch.setattr("hpctrain.checkpoint.saving.WHOLE_BYTES", 512)


def groups(comm):
    """Yield each group of the first n ranks, or None on ranks outside it."""
    for size in range(1, comm.size + 1):
        group = comm.group(range(size))
        yield size, group
        if group:
            group.close()
        comm.barrier()


def matrix():
    return torch.arange(float(ROWS * COLS)).reshape(ROWS, COLS).sin()


def by(dim, rank, size):
    """Return the part of the matrix that a rank holds: rows or columns."""
    lengths = [ROWS, COLS]
    cut = lengths[dim] * rank // size
    offset, shape = [0, 0], list(lengths)
    offset[dim], shape[dim] = cut, lengths[dim] * (rank + 1) // size - cut
    return Shard((ROWS, COLS), offset, shape)


def piece(shard):
    return TensorPiece(matrix()[Shard.whole((ROWS, COLS)).slices(shard)], shard)


@SIZES
@pytest.mark.usefixtures("small_blocks")
def test_state_saved_by_n_ranks_is_loaded_bitwise_by_m_ranks(comm, folder):
    state = of_every_kind()
    for size, group in groups(comm):
        if group:
            private = {"rank": group.rank, "noise": torch.full((group.rank + 1,), group.rank)}
            save(folder / f"from-{size}", state, group, step=size, private=private, facts={"n": 1})
    for size, group in groups(comm):
        for saved in range(1, comm.size + 1) if group else ():
            loaded = load(folder / f"from-{saved}", group)
            assert same(loaded.state, state), (saved, size)
            assert (loaded.step, loaded.facts) == (saved, {"n": 1})
            assert list(loaded.private) == list(range(saved))
            for rank, own in loaded.private.items():
                assert same(own, {"rank": rank, "noise": torch.full((rank + 1,), rank)})
            assert check(folder / f"from-{saved}") == []


@SIZES
@pytest.mark.usefixtures("small_blocks")
def test_sharded_state_is_loaded_whole_or_in_other_pieces(comm, folder):
    for size, group in groups(comm):
        for dim in (0, 1) if group else ():
            state = {"w": piece(by(dim, group.rank, size)), "n": 1}
            save(folder / f"{size}-{dim}", state, group, step=0)
    for size, group in groups(comm):
        everything = itertools.product(range(1, comm.size + 1), (0, 1), (0, 1))
        for saved, dim, to in everything if group else ():
            wanted = by(to, group.rank, size)
            loaded = load(folder / f"{saved}-{dim}", group, into={"w": wanted})
            assert same(loaded.state, {"w": piece(wanted), "n": 1})
            assert same(load(folder / f"{saved}-{dim}", group).state["w"], matrix())


SAVE, LOAD = {"step": 1}, {"into": None}


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize(
    ("method", "right", "wrong"),
    [
        *(("save", SAVE, {"facts": facts}) for facts in (7, "text")),
        ("save", SAVE, {"private": 7}),
        *(("save", SAVE, {"source_rank": rank}) for rank in ("0", 9, True)),
        *(("load", LOAD, {"into": into}) for into in (7, {"w": 3})),
        *(("manager", SAVE, {name: 7}) for name in ("facts", "private")),
        ("manager", SAVE, {"score": "best"}),
    ],
    ids=str,
)
def test_argument_that_is_wrong_on_one_rank_raises_on_all_ranks(
    comm, folder, method, right, wrong
):
    state = {"w": matrix()}
    save(folder / "step-00000000", state, comm, step=0)
    given = right | (wrong if comm.rank == comm.size - 1 else {})
    manager = Manager(folder, comm, background=False)
    calls = {
        "save": lambda: save(folder / "step-00000001", state, comm, **given),
        "load": lambda: load(folder / "step-00000000", comm, **given),
        "manager": lambda: manager.save(state, **given),
    }
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        calls[method]()
    manager.close()
    assert same(load(folder / "step-00000000", comm).state, state)


@pytest.mark.ranks(2, 3)
def test_ranks_that_disagree_on_wait_or_the_directory_raise_on_all_ranks(comm, folder):
    manager = Manager(folder, comm, background=False)
    with pytest.raises(CheckpointError, match="wait"):
        manager.save({"w": matrix()}, 1, wait=comm.rank == 1)
    manager.save({"w": matrix()}, 2)
    manager.close()
    with pytest.raises(CheckpointError, match="must load the same checkpoint"):
        load(folder / ("step-00000002" if comm.rank == 0 else "step-00000001"), comm)


@SIZES
def test_replicated_state_is_written_once_and_read_in_pieces(comm, folder):
    large = torch.arange(3 << 19).reshape(3 << 9, -1)
    saved = save(folder / "a", {"large": large}, comm, step=0)
    assert saved.bytes == large.nbytes
    files = {path.name: path.stat().st_size for path in folder.glob("a/rank-*")}
    nodes = {tuple(ranks) for ranks in comm.allgather_object(comm.node_ranks)}
    assert {*files} == {file_name(ranks[0]) for ranks in nodes}
    for ranks in nodes:
        share = len(ranks) / comm.size * large.nbytes
        assert files[file_name(ranks[0])] <= share + 3 * large.nbytes / 1000 + 8192
    shard = Shard(large.shape, (5, comm.rank), (1000, 7))
    loaded = load(folder / "a", comm, into={"large": shard})
    assert same(loaded.state["large"].tensor, large[5:1005, comm.rank : comm.rank + 7].clone())


@SIZES
def test_each_rank_writes_a_file_if_asked(comm, folder):
    state = {"large": torch.arange(3 << 19).reshape(3 << 9, -1)}
    save(folder / "a", state, comm, step=0, private={"rank": comm.rank}, files="rank")
    names = sorted(path.name for path in folder.glob("a/rank-*"))
    assert names == [file_name(rank) for rank in range(comm.size)]
    assert len(manifest_of(folder / "a")["files"]) == comm.size
    assert same(load(folder / "a", comm).state, state)
    comm.barrier()
    for files in ("none", "node" if comm.rank else "rank") if comm.size > 1 else ("none",):
        with pytest.raises(CheckpointError, match="files"):
            save(folder / "b", state, comm, step=0, files=files)


@SIZES
def test_copies_of_pieces_are_written_once(comm, folder):
    half = by(0, comm.rank % 2, 2) if comm.size > 1 else by(0, 0, 1)
    saved = save(folder / "a", {"w": piece(half)}, comm, step=0)
    assert saved.bytes == matrix().nbytes
    assert same(load(folder / "a", comm).state["w"], matrix())


@SIZES
def test_a_new_checkpoint_replaces_one_of_the_same_name(comm, folder):
    for number in range(3):
        save(folder / "new" / "a", {"number": number}, comm, step=number)
        assert load(folder / "new" / "a", comm).state == {"number": number}
        comm.barrier()
        assert [path.name for path in folder.glob("new/*")] == ["a"]
        comm.barrier()


def test_other_programs_read_the_files(comm, folder):
    state = of_every_kind()
    save(folder / "a", {**state, "private": 1}, comm, step=0, private={"x": 1})
    read = load_file(folder / "a" / "rank-00000.safetensors")
    assert same(read["dtypes/bfloat16"], state["dtypes"]["bfloat16"])
    assert same(read["keys/a%2Fb"], state["keys"]["a/b"])
    assert read.keys() == CheckpointManifest.read(folder / "a").tensors.keys() | {"%private"}


def refused(comm, folder, match, state, **more):
    """Assert that a save raises on every rank and leaves the old checkpoint unchanged."""
    save(folder / "a", {"text": "old"}, comm, step=0)
    with pytest.raises(CheckpointError, match=match):
        save(folder / "a", state, comm, step=1, **more)
    assert load(folder / "a", comm).state == {"text": "old"}
    comm.barrier()
    assert [path.name for path in folder.iterdir()] == ["a"]
    comm.barrier()


@SIZES
def test_differences_between_ranks_are_reported_with_their_path(comm, folder):
    if comm.size > 1:
        step = {"numbers": [7, comm.rank == 1]}
        refused(comm, folder, r"rank.* 1: numbers/1 = True.*ranks as private", step)
        shape = {"model": {"w": torch.zeros(2 + (comm.rank == 1))}}
        refused(comm, folder, r"rank.* 1: model/w is float32 \[3\]", shape)


@SIZES
def test_state_that_cannot_be_saved_raises_on_every_rank(comm, folder):
    last = comm.rank == comm.size - 1
    for value, match in [
        (len, "got builtins.builtin_function_or_method at x"),
        (
            torch.zeros(2).to_sparse(),
            "not on the meta device, got torch.sparse_coo on cpu at x",
        ),
        (torch.zeros(2, device="meta"), "on meta at x"),
        (torch.empty(2, dtype=torch.bits8), "got bits8 at x"),
    ]:
        refused(comm, folder, match, {"x": value if last else 1})
    private = {"p": piece(by(0, 0, 1))}
    refused(comm, folder, "put it into the state", {}, private=private if last else {})
    refused(comm, folder, "the facts of a checkpoint must be values of JSON", {}, facts={"x": len})


@SIZES
def test_incomplete_pieces_are_rejected(comm, folder):
    lost = Shard((ROWS, COLS), (comm.rank, 0), (1, COLS))
    refused(comm, folder, rf"for w .*hold {comm.size * COLS} of 2000 elements", {"w": piece(lost)})


@SIZES
def test_full_disk_raises_on_every_rank_and_keeps_the_old_checkpoint(comm, folder):
    save(folder / "a", {"text": "old"}, comm, step=0)
    state = {"large": torch.zeros(8 << 20, dtype=torch.uint8)}
    with largest_file(10_000 if comm.rank == comm.size - 1 else 1 << 30):
        for _ in range(2):
            with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*a: File too la"):
                save(folder / "a", state, comm, step=1)
    assert load(folder / "a", comm).state == {"text": "old"}
    comm.barrier()
    assert [path.name for path in folder.iterdir()] == ["a"]


@SIZES
@pytest.mark.requires("root")
def test_missing_permission_of_one_rank_raises_on_every_rank(comm, folder):
    save(folder / "a", {"text": "old"}, comm, step=0)
    last = comm.rank == comm.size - 1
    os.seteuid(65534 if last else 0)
    try:
        with pytest.raises(CheckpointError, match=r"write checkpoint .*: Permission denied"):
            save(folder / "a", {"text": "new"}, comm, step=1)
    finally:
        os.seteuid(0)
    assert load(folder / "a", comm).state == {"text": "old"}


@SIZES
def test_removed_or_invalid_directory_raises_on_every_rank(comm, folder, monkeypatch):
    (folder / "file").touch()
    comm.barrier()
    for place in (folder / "file" / "a", folder / "file"):
        with pytest.raises(CheckpointError, match=r"cannot write checkpoint .*: Not a directory"):
            save(place, {}, comm, step=0)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*/none, or its save"):
        load(folder / "none", comm)
    write = tensor_file.write

    def vanish(*arguments):
        comm.barrier()
        if comm.rank == 0:
            shutil.rmtree(folder / "run")
        comm.barrier()
        return write(*arguments)

    monkeypatch.setattr(saving.tensor_file, "write", vanish)
    with pytest.raises(CheckpointError, match="No such file or directory"):
        save(folder / "run" / "a", {"x": torch.zeros(10)}, comm, step=0)
    assert not (folder / "run").exists()


@SIZES
def test_request_for_missing_tensors_raises_on_every_rank(comm, folder):
    save(folder / "a", {"w": torch.zeros(4)}, comm, step=0)
    mine = comm.rank == comm.size - 1
    for into, match in [
        ({"v": Shard.whole((4,))}, "has no v; choose from its tensors, w"),
        ({"w": Shard.whole((5,))}, r"w must have the shape in the checkpoint, \[4\], got \[5\]"),
    ]:
        with pytest.raises(CheckpointError, match=match):
            load(folder / "a", comm, into=into if mine else None)


@SIZES
@pytest.mark.parametrize("step", ["x", -3, True, 1.5, 10**30, None])
def test_an_invalid_step_is_an_error_and_keeps_the_older_checkpoint(comm, folder, step):
    save(folder / "a", {"a": torch.ones(2)}, comm, step=1)
    with pytest.raises(CheckpointError, match="the step of a checkpoint must be an integer"):
        save(folder / "a", {"a": torch.zeros(2)}, comm, step=step)
    assert same(load(folder / "a", comm).state["a"], torch.ones(2))


@SIZES
def test_tensors_without_elements_of_their_own_are_an_error(comm, folder):
    wrapper = TwoTensor(torch.ones(2), torch.ones(2))
    for state in ({"w": [wrapper]}, {"w": [TensorPiece(wrapper, Shard.whole((2,)))]}):
        with pytest.raises(CheckpointError, match="w/0 is a TwoTensor; pass a TensorPiece"):
            save(folder / "a", state, comm, step=1)
    assert not (folder / "a").exists()


@SIZES
def test_any_error_of_a_guard_is_an_error_on_all_ranks(comm, folder):
    def guard():
        raise ValueError("no lease")

    with pytest.raises(CheckpointError, match="ValueError: no lease"):
        save(folder / "a", {"a": torch.ones(2)}, comm, step=1, guard=guard)
    comm.barrier()
    assert not any(folder.iterdir())
