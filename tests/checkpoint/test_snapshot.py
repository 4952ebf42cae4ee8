"""A snapshot is equal, is not touched by the training, and uses its memory again."""

import torch

from hpctrain.checkpoint.background import Snapshot, on_cpu
from hpctrain.checkpoint.format.shard import Piece, Shard
from tests.checkpoint.states import same


def state(value):
    weights = torch.full((3, 4), value).requires_grad_()
    return {
        "model": {"w": weights, "b": torch.tensor(value).bfloat16()},
        "pieces": [Piece(torch.full((2,), value), Shard((4,), (2,), (2,)))],
        "turned": torch.arange(6.0).view(2, 3).T + value,
        "plain": (1, value, "text", None, b"bytes"),
    }


def tensors(taken):
    return [
        *taken["model"].values(),
        taken["pieces"][0].tensor,
        taken["turned"],
    ]


def test_a_snapshot_is_equal_and_stays_so_when_the_state_changes():
    original = state(1.0)
    taken = Snapshot().take(original)
    assert same(taken, original)
    with torch.no_grad():
        for tensor in tensors(original):
            tensor.zero_()
    assert same(taken, state(1.0))
    assert not any(tensor.requires_grad for tensor in tensors(taken))
    assert taken["pieces"][0].shard == original["pieces"][0].shard


def test_memory_is_used_again():
    snapshot = Snapshot()
    first = [tensor.data_ptr() for tensor in tensors(snapshot.take(state(1.0)))]
    taken = snapshot.take(state(2.0))
    assert [tensor.data_ptr() for tensor in tensors(taken)] == first
    assert same(taken, state(2.0))


def test_memory_follows_the_state():
    snapshot = Snapshot()
    snapshot.take({"a": torch.zeros(1000), "b": torch.zeros(10)})
    assert snapshot.num_bytes == 4040
    taken = snapshot.take({"b": torch.ones(20), "c": torch.ones(5).double()})
    assert snapshot.num_bytes == 80 + 40
    assert torch.equal(taken["b"], torch.ones(20))
    assert torch.equal(taken["c"], torch.ones(5).double())


def test_the_ranks_share_the_copy_of_what_is_replicated():
    large = torch.randn(1001, 1000)
    piece = Piece(torch.ones(7), Shard((21,), (7,), (7,)))
    original = {"large": large, "small": torch.ones(3), "one": torch.tensor(1), "piece": piece}
    snapshots = [Snapshot(rank, 3) for rank in range(3)]
    taken = [snapshot.take(original) for snapshot in snapshots]
    for copy in taken:
        assert torch.equal(copy["piece"].tensor, piece.tensor)
        assert copy["large"].shape == large.shape
    sizes = [snapshot.num_bytes - piece.tensor.nbytes for snapshot in snapshots]
    assert sum(sizes) == large.nbytes + 12 + 8
    assert max(sizes) - min(sizes) <= 8000


def test_a_state_on_the_cpu_is_not_copied():
    original = state(1.0)
    taken = on_cpu(original)
    assert same(taken, original)
    assert taken["model"]["w"].data_ptr() == original["model"]["w"].data_ptr()
