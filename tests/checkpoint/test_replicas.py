"""Check that a checkpoint has the state of one rank, no matter which ranks write, or all raise."""

import pickle
import random
import re

import numpy as np
import pytest
import torch

from hpctrain.checkpoint import piece_plan, replicas
from hpctrain.checkpoint.format.shard import Shard, TensorPiece
from hpctrain.checkpoint.format.state_hash import _MIX, device_checksum, state_hash
from hpctrain.checkpoint.loading import load
from hpctrain.checkpoint.manager import Manager
from hpctrain.checkpoint.piece_plan import PiecePlan
from hpctrain.checkpoint.saving import save
from hpctrain.comm.serial import SerialCommunicator
from hpctrain.comm.tensor_arguments import host_bytes
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.managed import steps_in
from tests.checkpoint.operations import slope
from tests.checkpoint.states import of_every_dtype, of_every_kind, same
from tests.checkpoint.test_block_reader import all_parts

SHAPES = [(), (1,), (7,), (0, 3), (1, 700), (37, 11), (3, 5, 40)]
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch):
    """Let small tensors have many blocks, and split them."""
    for module in ("format.tensor_file", "format.manifest", "loading", "block_reader"):
        monkeypatch.setattr(f"hpctrain.checkpoint.{module}.BLOCK_BYTES", 256)
    monkeypatch.setattr("hpctrain.checkpoint.saving.WHOLE_BYTES", 512)


def drawn(draw):
    """Return a state of a few tensors of random shapes, dtypes and strides."""
    generator = torch.Generator().manual_seed(draw.randrange(1 << 30))
    tensors = {}
    for number in range(draw.randint(1, 6)):
        shape, dtype = draw.choice(SHAPES), draw.choice(DTYPES)
        tensor = torch.randn(shape, generator=generator, dtype=torch.float64).mul(9).to(dtype)
        is_turned = len(shape) == 2 and draw.random() < 0.3
        tensors[f"t{number}"] = tensor.T if is_turned else tensor
    return tensors


def flip(tensor, draw):
    """Change one bit of a tensor, or exchange two elements that differ."""
    flat = tensor.clone(memory_format=torch.contiguous_format).reshape(-1)
    data = flat.view(torch.uint8).view(len(flat), -1)
    places = (data != data[0]).any(dim=1).nonzero().flatten().tolist()
    if places and draw.random() < 0.3:
        other = draw.choice(places)
        data[[0, other]] = data[[other, 0]]
    elif flat.dtype is torch.bool:
        data[0] ^= 1
    else:
        data[draw.randrange(len(data)), draw.randrange(data.shape[1])] ^= 1 << draw.randrange(8)
    return flat.reshape(tensor.shape)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_a_checkpoint_is_the_state_of_one_rank_or_an_error_on_all(comm, root, background):
    draw = random.Random(comm.size)
    with_error = 0
    for number in range(20):
        mine = drawn(draw)
        names = [name for name, tensor in mine.items() if tensor.numel()]
        odd, rank = draw.choice([*names, None, None]), draw.randrange(comm.size)
        if odd is not None:
            other = flip(mine[odd], draw)
            if comm.rank == rank:
                mine[odd] = other
        source = draw.choice([None, None, draw.randrange(comm.size)])
        folder, refusal = root / str(number), None
        manager = Manager(folder, comm, background=background)
        try:
            if background:
                manager.save(mine, 1, source_rank=source)
                manager.wait()
            else:
                save(folder / "step-00000001", mine, comm, step=1, source_rank=source)
        except CheckpointError as error:
            refusal = str(error)
        manager.close()
        if odd is not None and source is None:
            assert re.search(rf"1 of \d+ differ: {odd} \(rank.* differs from rank", refusal)
            comm.barrier()  # rank 0 has removed the partial checkpoint
            assert not list(folder.glob("*"))
            with_error += 1
        else:
            assert refusal is None
            expected = comm.broadcast_object(mine, root=source or 0)
            assert same(load(folder / "step-00000001", comm).state, expected)
    assert 3 < with_error < 15


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("missing", "named"), [("n", "a/n = 2"), ("t", "a/t is float32")])
def test_missing_value_of_a_mapping_is_named(comm, root, missing, named):
    state = {"a": {"n": 2, "t": torch.ones(3)}, "b": 1}
    if comm.rank == 1:
        del state["a"][missing]
    with pytest.raises(CheckpointError, match=rf"differs: rank 0: {named}"):
        save(root / "step-00000001", state, comm, step=1)


@pytest.mark.ranks(2, 3, 4)
def test_different_tensors_and_ranks_are_reported_with_remedies(comm, root):
    state = {"a": torch.zeros(3), "b": torch.ones(2), "c": torch.ones(2, 2), "d": torch.zeros(1)}
    if comm.rank == 1:
        state |= {"a": torch.full((3,), -0.0), "c": torch.zeros(2, 2)}
    with pytest.raises(CheckpointError) as caught:
        save(root / "step-00000001", state, comm, step=1)
    others = {2: "rank 0", 3: "ranks 0,2", 4: "ranks 0,2-3"}[comm.size]
    found = f"2 of 4 differ: a, c ({others} differs from rank 1)"
    assert found in str(caught.value)
    # The remedies that the message names.
    for tensor in state.values():
        comm.broadcast_(tensor).wait()
    save(root / "step-00000001", state, comm, step=1)
    mine = {"a": torch.full((3,), float(comm.rank))}
    save(root / "step-00000002", {}, comm, step=2, private=mine)
    save(root / "step-00000003", mine, comm, step=3, source_rank=0)
    assert load(root / "step-00000002", comm).private[1]["a"].tolist() == [1, 1, 1]
    assert load(root / "step-00000003", comm).state["a"].tolist() == [0, 0, 0]


CONTAINERS = [
    [(), []],
    [{}, []],
    [{"a": (1, 2)}, {"a": [1, 2]}],
    [(torch.ones(1),), [torch.ones(1)]],
]


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("pair", CONTAINERS)
def test_different_containers_of_equal_values_raise_on_all_ranks(comm, root, pair):
    state = {"part": pair[comm.rank == comm.size - 1]}
    with pytest.raises(CheckpointError, match=r"a tuple|a list"):
        save(root / "step-00000001", state, comm, step=1)
    assert not (root / "step-00000001").exists()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("values", [(1, 2), (torch.ones(1), torch.ones(1))])
def test_another_order_of_the_same_keys_is_named_with_ranks_and_key(comm, root, values):
    state = {"part": dict(zip("xy", values, strict=True))}
    if comm.rank == 1:
        state["part"] = dict([*state["part"].items()][::-1])
    match = (
        r"only the order of the entries differs, first at entry \d, .*: part/x .*rank 1: "
        r"part/y .*; add the keys of each dict in the same order on every rank"
    )
    with pytest.raises(CheckpointError, match=match):
        save(root / "step-00000001", state, comm, step=1)
    state["part"] = {key: state["part"][key] for key in "xy"}
    save(root / "step-00000001", state, comm, step=1)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_state_of_the_source_rank_alone_is_written_unchanged(comm, root, background):
    source = comm.size - 1
    state = of_every_kind() if comm.rank == source else {"other": torch.ones(3), "n": comm.rank}
    manager = Manager(root, comm, background=background)
    manager.save(state, 1, wait=True, source_rank=source)
    manager.close()
    assert same(load(root / "step-00000001", comm).state, of_every_kind())
    assert state_hash(load(root / "step-00000001", SerialCommunicator()).state)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_copies_of_a_piece_are_compared_and_the_source_rank_takes_precedence(
    comm, root, background
):
    # Rank 0 and the last rank hold the first half, the other ranks the second.
    is_first = comm.rank in (0, comm.size - 1) if comm.size > 2 else comm.rank == 0
    shards = [Shard((4, 3), (0, 0), (2, 3)), Shard((4, 3), (2, 0), (2, 3))]
    shard = shards[0] if is_first else shards[1]

    def state(value):
        return {"piece": TensorPiece(torch.full((2, 3), float(value)), shard)}

    manager = Manager(root, comm, background=background)
    manager.save(state(is_first), 1, wait=True)
    if comm.size > 2:
        for step in (2, 3):
            match = r"1 of \d differ: piece at \[0, 0\] \(rank 0 differs from rank"
            with pytest.raises(CheckpointError, match=match):
                manager.save(state(comm.rank if is_first else 7), step, wait=True)
        manager.save(state(comm.rank if is_first else 7), 4, wait=True, source_rank=comm.size - 1)
        loaded = manager.load_latest().state["piece"]
        assert loaded[:, 0].tolist() == [comm.size - 1, comm.size - 1, 7, 7]
    manager.close()
    assert steps_in(root)[0] == 1


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("source", [-1, 9])
@pytest.mark.parametrize("background", [True, False], ids=["background", "foreground"])
def test_invalid_or_different_source_ranks_raise_on_all(comm, root, source, background):
    with pytest.raises(CheckpointError, match=rf"from 0 to {comm.size - 1}, got {source}"):
        save(root / "step-00000001", {}, comm, step=1, source_rank=source)
    manager = Manager(root, comm, background=background)
    with pytest.raises(CheckpointError, match=rf"from 0 to {comm.size - 1}, got {source}"):
        manager.save({}, 1, wait=True, source_rank=source)
    for options in ({"source_rank": comm.rank or None}, {"score": float(comm.rank)}):
        with pytest.raises(CheckpointError, match="must be the same on every rank"):
            manager.save({}, 1, **options)
    with pytest.raises(CheckpointError, match="step 1"):
        manager.save({}, comm.rank)
    manager.close()


@pytest.mark.ranks(2, 3)
def test_hash_of_different_values_raises_on_all_ranks(comm):
    state = {"a": torch.ones(40), "b": torch.ones(40), "n": 1}
    for name, other in (("a", torch.zeros(40)), ("b", torch.full((40,), 2.0)), ("n", 2)):
        with pytest.raises(CheckpointError, match="but names or values differ"):
            state_hash({**state, name: other} if comm.rank == 1 else state, comm)


def test_device_checksum_depends_on_every_bit_and_position():
    draw = random.Random(0)
    tensors = [*of_every_dtype().values(), torch.randn(70_000), torch.tensor(2.5)]
    seen = [int(device_checksum(tensor)) for tensor in tensors]
    assert seen == [int(device_checksum(tensor.clone())) for tensor in tensors]
    for tensor, checksum in zip(tensors, seen, strict=True):
        for _ in range(20):
            changed = flip(tensor, draw)
            is_equal = host_bytes(changed) == host_bytes(tensor)
            assert (int(device_checksum(changed)) == checksum) == is_equal
    wide = torch.arange(60).reshape(3, 4, 5)
    for view in (wide.transpose(0, 2), wide[:, 1::2], wide[1], wide.expand(2, 3, 4, 5)):
        assert device_checksum(view) == device_checksum(view.contiguous())


def test_device_checksum_differs_for_values_of_one_element():
    # With all bits of the mixed value inverted: an arithmetic shift would lose the difference.
    inverse = pow(_MIX[1], -1, 1 << 64)
    for value in (0, 1, -5, 1 << 40):
        other = (-value - inverse + (1 << 63)) % (1 << 64) - (1 << 63)
        pair = [device_checksum(torch.tensor([number])) for number in (value, other)]
        assert pair[0] != pair[1]


def test_device_checksum_does_not_depend_on_the_piece_size(monkeypatch):
    tensor = torch.randn(1000)
    expected = device_checksum(tensor)
    monkeypatch.setattr("hpctrain.checkpoint.format.state_hash._PIECE_BYTES", 8 * 7)
    assert device_checksum(tensor) == expected


@pytest.mark.ranks(2)
def test_large_tensors_are_compared_in_threads_with_the_same_result(comm, root, monkeypatch):
    monkeypatch.setattr(replicas, "_POOL_BYTES", 0)
    state = {f"t{number}": torch.full((1000,), float(number)) for number in range(9)}
    save(root / "step-00000001", state, comm, step=1)
    state["t8"][999] += comm.rank
    with pytest.raises(CheckpointError, match="1 of 9 differ: t8"):
        save(root / "step-00000002", state, comm, step=2)


@pytest.mark.ranks(2, 3, 4)
def test_only_rank_0_receives_the_pieces_of_all_ranks(comm, root, monkeypatch):
    """Let a model with 40 sharded tensors be held twice, and count the objects of each rank."""
    half, num_halves = comm.rank // 2, (comm.size + 1) // 2
    shard = Shard((num_halves, 3), (half, 0), (1, 3))
    pieces = {f"p{n}": TensorPiece(torch.full((1, 3), float(half)), shard) for n in range(40)}
    gather, received = comm.allgather_object, []

    def count(value, *args):
        received.append(gather(value, *args))
        return received[-1]

    monkeypatch.setattr(comm, "allgather_object", count)
    save(root / "step-00000001", pieces, comm, step=1)
    assert len(pickle.dumps(received)) < 600 * comm.size
    kept = all_parts(root / "step-00000001").records()
    for record in kept.values():
        assert [part.shard.offset[0] for part in record.parts] == [*range(num_halves)]
        assert all(part.rank // 2 == part.shard.offset[0] for part in record.parts)
    assert {part.rank for record in kept.values() for part in record.parts} == {*range(comm.size)}
    loaded = load(root / "step-00000001", comm).state
    assert all(loaded[name][:, 0].tolist() == [*range(num_halves)] for name in pieces)


def holders_of(num):
    """Return boxes of ``num`` ranks, of which two each hold the same row of 3 tensors."""
    rows = [[3, rank // 2, 0, 1, 3] * 3 for rank in range(num)]
    return (dict.fromkeys("abc", (num // 2, 3)), np.array(rows), None)


def test_operations_of_the_choice_of_writers_grow_with_the_ranks():
    assert slope(piece_plan._choose, holders_of, 256) < 1.1


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("source", [None, 0, "last"])
def test_one_holder_writes_each_piece(comm, source):
    draw = random.Random(comm.size)
    source = comm.size - 1 if source == "last" else source
    for _ in range(30):
        cuts = [draw.randint(1, min(3, comm.size)) for _ in range(draw.randint(1, 5))]
        # Each rank holds a row, or none; each row is on a rank. Tensors often have equal layouts.
        rows_of = {
            cut: [*range(cut), *draw.choices([*range(cut), None], k=comm.size - cut)]
            for cut in cuts
        }
        for rows in rows_of.values():
            draw.shuffle(rows)
        shards = []  # by rank
        for rank in range(comm.size):
            mine = [(cut, rows_of[cut][rank]) for cut in cuts]
            shards.append(
                {
                    f"p{n}": Shard((cut, 2), (row or 0, 0), (int(row is not None), 2))
                    for n, (cut, row) in enumerate(mine)
                }
            )
        plan = PiecePlan.of(comm, shards[comm.rank], source)
        assert plan.written == [path for path in shards[0] if path in plan.written]
        of_ranks = comm.allgather_object((plan.written, plan.compared, plan.shared))
        assert all(shared == plan.shared for _, _, shared in of_ranks)
        for number, (path, cut) in enumerate(zip(shards[0], cuts, strict=True)):
            holders = [
                [rank for rank, row in enumerate(rows_of[cut]) if row == place]
                for place in range(cut)
            ]
            writers = [rank for rank, (written, _, _) in enumerate(of_ranks) if path in written]
            assert sorted(writers) == sorted(
                source if source in ranks else ranks[(number + place) % len(ranks)]
                for place, ranks in enumerate(holders)
            )
            copies = [ranks for ranks in holders if len(ranks) > 1 and source not in ranks]
            compared = [rank for rank, (_, paths, _) in enumerate(of_ranks) if path in paths]
            assert compared == sorted(rank for ranks in copies for rank in ranks)
            assert (path in plan.shared) == bool(copies)


@pytest.mark.ranks(2, 3, 4)
def test_rank_0_receives_the_pieces_of_one_tensor_of_each_layout(comm, monkeypatch):
    gather, sent = comm.gather_object, []
    monkeypatch.setattr(comm, "gather_object", lambda value: gather(sent.append(value) or value))
    whole = {f"whole{n}": Shard.whole((2, n + 1)) for n in range(2)}
    rows = {f"rows{n}": Shard((comm.size, 3), (comm.rank, 0), (1, 3)) for n in range(40)}
    # The last tensor differs from the rows on two ranks only, which have exchanged their parts.
    other = {0: 1, 1: 0}.get(comm.rank, comm.rank)
    turned = {"turned": Shard((comm.size, 3), (other, 0), (1, 3))}
    plan = PiecePlan.of(comm, {**whole, **rows, **turned}, None)
    (boxes,) = sent
    assert len(boxes) == 4 * (1 + 2 * 2)
    assert plan.written[-41:] == [*rows, *turned]
    assert plan.shared == [*whole]


@pytest.mark.ranks(2, 3, 4)
def test_an_invalid_division_is_named_with_its_first_tensor(comm):
    rows = Shard((comm.size, 3), (comm.rank, 0), (1, 3))
    same = Shard((comm.size, 3), (0, 0), (1, 3))
    pieces = {"a": rows, "b": same, "c": rows, "d": same}
    match = rf"for b \[{comm.size}, 3\] the parts hold 3 of {3 * comm.size} elements"
    with pytest.raises(CheckpointError, match=match):
        PiecePlan.of(comm, pieces, None)


@pytest.mark.ranks(2, 3, 4)
def test_copies_that_differ_are_found_in_any_tensor_and_on_any_rank(comm):
    draw = random.Random(comm.size)
    shard = Shard.whole((2, 3)) if comm.rank < 2 else Shard((2, 3), (0, 0), (0, 3))
    plan = PiecePlan.of(comm, {f"p{n}": shard for n in range(9)}, None)
    for _ in range(20):
        checksums = {f"p{n}": draw.getrandbits(32) for n in range(9)}
        odd, rank = draw.sample([*checksums], draw.randint(0, 4)), draw.randrange(2)
        if comm.rank == rank:
            checksums |= {path: checksums[path] ^ 1 << draw.randrange(32) for path in odd}
        draw = random.Random(comm.broadcast_object(draw.random()))
        mine = checksums if comm.rank < 2 else {}
        if not odd:
            plan.require_same(mine)
            continue
        named = ", ".join(rf"{path} at \[0, 0\]" for path in sorted(odd)[:3])
        match = rf"{len(odd)} of 9 differ: {named} \(rank 0 differs from rank 1\)"
        with pytest.raises(CheckpointError, match=match):
            plan.require_same(mine)
