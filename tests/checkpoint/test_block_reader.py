"""Check that each node reads each block of a checkpoint once, and only the blocks it needs."""

import random

import pytest
import torch

from hpctrain.checkpoint import block_reader, part_lists
from hpctrain.checkpoint.block_reader import _Block, _rounds
from hpctrain.checkpoint.format import manifest
from hpctrain.checkpoint.format.manifest import CheckpointManifest
from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.checkpoint.format.tensor_file import TensorFile
from hpctrain.checkpoint.loading import load
from hpctrain.checkpoint.part_lists import PartIndex
from hpctrain.checkpoint.saving import save
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.core.errors import CheckpointError
from hpctrain.runtime.world import current
from tests.checkpoint.managed import flip
from tests.checkpoint.states import of_every_kind, same
from tests.checkpoint.test_hostile import manifest_of, seal, to_version_1
from tests.comm.conftest import PATHS, connected

BLOCK = 1024
ROWS, COLS = 400, 30


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Let small tensors have many blocks, and split them."""
    for module in ("format.tensor_file", "format.manifest", "loading", "block_reader"):
        monkeypatch.setattr(f"hpctrain.checkpoint.{module}.BLOCK_BYTES", BLOCK)
    monkeypatch.setattr("hpctrain.checkpoint.saving.WHOLE_BYTES", 512)


@pytest.fixture(params=["one node", "nodes of two", "nodes of one"])
def comm(request):
    with connected(PATHS[request.param]) as made:
        yield made.comm


@pytest.fixture
def reads(monkeypatch):
    """Return the lists of opened files and of blocks that this rank reads."""
    opened, blocks = [], []
    open_file, read_into = block_reader.opened, TensorFile.read_into

    def note_opened(path):
        opened.append(path.name)
        return open_file(path)

    def note_read(self, name, start, memory, crcs):
        assert len(memory) <= BLOCK
        blocks.append((self._path.name, name, start))
        read_into(self, name, start, memory, crcs)

    monkeypatch.setattr(block_reader, "opened", note_opened)
    monkeypatch.setattr(TensorFile, "read_into", note_read)
    return opened, blocks


def of_node(comm, items):
    """Return the items of all ranks of this node."""
    of_ranks = comm.allgather_object(items)
    return [item for rank in comm.node_ranks for item in of_ranks[rank]]


def matrix():
    return torch.arange(float(ROWS * COLS)).reshape(ROWS, COLS)


def all_parts(directory):
    """Return the parts in all files of a checkpoint."""
    index = PartIndex(directory, CheckpointManifest.read(directory))
    index.read([file.first_rank for file in index.manifest.files])
    return index


def num_blocks(record):
    return sum(len(part.crcs) for part in record.parts)


@pytest.mark.ranks(2, 3, 4)
def test_each_block_is_read_once_per_node(comm, root, reads):
    opened, blocks = reads
    state = {"w": matrix(), "small": [torch.ones(3) * i for i in range(20)], "e": torch.ones(0)}
    save(root / "a", state, comm, step=1, private={"rank": comm.rank, "x": torch.ones(400)})
    loaded = load(root / "a", comm)
    assert same(loaded.state, state)
    mine = {"rank": comm.rank, "x": torch.ones(400)}
    opens, found = of_node(comm, opened), of_node(comm, blocks)
    assert same(loaded.private[comm.rank], mine)
    assert len({*found}) == len(found)
    kept = all_parts(root / "a")
    records = [*kept.records().values()]
    records += [one for rank in comm.node_ranks for one in kept.private(rank).values()]
    assert len(found) == sum(map(num_blocks, records))
    assert len(opens) < comm.size + len(comm.node_ranks)


@pytest.mark.ranks(2, 3, 4)
def test_a_node_reads_the_blocks_of_its_pieces_only(comm, root, reads):
    save(root / "a", {"w": matrix()}, comm, step=1)
    rows = ROWS // comm.size
    shard = Shard((ROWS, COLS), (rows * comm.rank, 4), (rows, 20))
    loaded = load(root / "a", comm, into={"w": shard})
    place = Shard.whole((ROWS, COLS)).slices(shard)
    assert same(loaded.state["w"], TensorPiece(matrix()[place].clone(), shard))
    found = of_node(comm, reads[1])
    assert len({*found}) == len(found)
    needed = rows * len(comm.node_ranks) * COLS * 4 / BLOCK
    assert needed - 1 <= len(found) <= needed + 2 * comm.size * len(comm.node_ranks)


@pytest.mark.ranks(2, 3, 4)
def test_small_checkpoint_is_opened_once_per_node(comm, root, reads):
    if comm.rank == 0:
        save(root / "a", {"w": torch.ones(5)}, SerialCommunicator(), step=1)
    comm.barrier()
    assert load(root / "a", comm).state["w"].tolist() == [1] * 5
    assert len(of_node(comm, reads[0])) == 1


@pytest.mark.ranks(2, 3, 4)
def test_random_pieces_are_loaded_bitwise(comm, root):
    draw = random.Random(comm.rank)
    state = of_every_kind() | {"w": matrix(), "t": matrix().T.double()}
    save(root / "a", state, comm, step=1)
    for _ in range(10):
        into = {}
        for name in draw.choice(["", "w", "t", "wt"]):
            shape = tuple(state[name].shape)
            ends = [sorted(draw.choices(range(size + 1), k=2)) for size in shape]
            sizes = [stop - start for start, stop in ends]
            into[name] = Shard(shape, [start for start, _ in ends], sizes)
        expected = dict(state)
        for name, shard in into.items():
            whole = Shard.whole(shard.global_shape)
            expected[name] = TensorPiece(state[name][whole.slices(shard)].clone(), shard)
        assert same(load(root / "a", comm, into=into).state, expected)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("harm", [flip, lambda path: path.unlink()], ids=["flipped", "missing"])
def test_damage_found_by_one_reader_raises_the_same_error_on_all_ranks(comm, root, harm):
    save(root / "a", {"w": matrix()}, comm, step=1)
    name = max(path.name for path in (root / "a").glob("rank-*"))
    comm.barrier()
    if comm.rank == 0:
        harm(root / "a" / name)
    comm.barrier()
    with pytest.raises(CheckpointError) as caught:
        load(root / "a", comm)
    assert len({*comm.allgather_object(str(caught.value))}) == 1
    assert not str(caught.value).startswith("rank")
    assert name in str(caught.value)


@pytest.mark.ranks(2, 3)
@pytest.mark.usefixtures("hvd")
def test_world_with_a_communication_thread_loads(root):
    comm = current().comm
    save(root / "a", {"w": matrix()}, comm, step=1, private={"rank": comm.rank})
    loaded = load(root / "a", comm)
    assert same(loaded.state, {"w": matrix()})
    assert loaded.private[comm.rank] == {"rank": comm.rank}


@pytest.mark.parametrize("num_readers", [1, 3, 64])
def test_readers_divide_the_bytes_and_memory_of_a_round_has_no_overlap(num_readers):
    draw = random.Random(num_readers)
    sizes = [draw.choice([1, 30, 500, BLOCK]) for _ in range(800)]
    blocks = [_Block(number, 0, 0, size) for number, size in enumerate(sizes)]
    read = [0] * num_readers
    for slots in _rounds(iter(blocks), num_readers):
        used = {}
        for reader, first, block in slots:
            assert first == used.get(reader, 0)
            used[reader] = first + block.num_bytes
            read[reader] += block.num_bytes
        assert max(used.values()) <= BLOCK
    assert sum(read) == sum(sizes)
    assert max(read) <= max(sum(sizes) / num_readers, BLOCK) + 2 * BLOCK


def test_records_of_other_ranks_are_not_parsed(root, monkeypatch):
    save(root / "a", {"w": torch.ones(5)}, SerialCommunicator(), step=1, private={"x": 1})
    to_version_1(root / "a")
    output = manifest_of(root / "a")
    of_ranks = dict.fromkeys(range(500), output["private"]["0"])
    seal(root / "a", {**output, "world": 500, "private": of_ranks})
    parsed, record = [], manifest._record
    monkeypatch.setattr(manifest, "_record", lambda *args: parsed.append(args) or record(*args))
    loaded = load(root / "a", SerialCommunicator())
    assert len(loaded.private) == 500
    assert len(parsed) == 2


@pytest.mark.ranks(1, 2, 3, 4)
def test_a_rank_reads_the_headers_of_the_files_that_it_requires_only(comm, root, monkeypatch):
    """Each rank loads the rows that it has saved, or rows of another rank."""
    listed, read_list = [], part_lists.read_list

    def note(directory, file, tensors):
        listed.append(file.first_rank)
        return read_list(directory, file, tensors)

    monkeypatch.setattr(part_lists, "read_list", note)
    whole = torch.arange(3.0 * comm.size).reshape(comm.size, 3)

    def row(rank):
        return Shard(whole.shape, (rank, 0), (1, 3))

    state = {"w": TensorPiece(whole[[comm.rank]], row(comm.rank)), "n": 1}
    save(root / "a", state, comm, step=1, private={"x": comm.rank}, files="rank")
    for shift in range(comm.size):
        listed.clear()
        other = (comm.rank + shift) % comm.size
        loaded = load(root / "a", comm, into={"w": row(other)})
        assert same(loaded.state["w"], TensorPiece(whole[[other]], row(other)))
        found = of_node(comm, listed)
        assert sorted({*found}) == sorted(found)
        assert {*comm.node_ranks} <= {*found}
        if not shift:
            assert {*comm.node_ranks} == {*found}
        listed.clear()
        assert loaded.private[other] == {"x": other}
        assert len(listed) <= 1
    assert len(loaded.private) == len([*loaded.private]) == comm.size


@pytest.mark.ranks(2, 3, 4)
def test_the_size_of_the_manifest_does_not_depend_on_the_number_of_parts(comm, root):
    """Save one tensor in one part, or in a part for each rank."""
    whole, sizes = torch.arange(64.0 * comm.size).reshape(comm.size, 64), []
    for number, first in enumerate((0, comm.rank)):
        rows = slice(first, first + 1) if number else slice(0, comm.size * (comm.rank == 0))
        values = whole[rows]
        shard = Shard(whole.shape, (rows.start, 0), values.shape)
        save(root / "a", {"w": TensorPiece(values, shard)}, comm, step=1)
        assert same(load(root / "a", comm).state["w"], whole)
        sizes.append((root / "a" / "manifest.json").stat().st_size)
        comm.barrier()
    assert abs(sizes[0] - sizes[1]) < 16
