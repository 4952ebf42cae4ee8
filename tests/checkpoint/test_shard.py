"""Boxes of a tensor: what they share is what their elements share."""

import itertools
import random

import pytest
import torch

from hpctrain.checkpoint.format.shard import Piece, Shard, fault_of_cover
from hpctrain.checkpoint.saving import WHOLE_BYTES, divide, owners
from hpctrain.core.errors import CheckpointError

SHAPES = [(), (5,), (0, 3), (4, 3), (2, 3, 4)]


def boxes(shape, number):
    choice = random.Random(0)
    for _ in range(number):
        ends = [sorted(choice.choices(range(size + 1), k=2)) for size in shape]
        yield Shard(shape, [start for start, _ in ends], [stop - start for start, stop in ends])


def numbers(shard):
    """Return the elements of a box, by row-major number in the tensor."""
    whole = torch.arange(Shard.whole(shard.global_shape).numel).reshape(shard.global_shape)
    return whole[Shard.whole(shard.global_shape).slices(shard)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_intersection_holds_the_elements_that_both_hold(shape):
    for a, b in itertools.product(boxes(shape, 12), repeat=2):
        common = a.intersection(b)
        wanted = {*numbers(a).flatten().tolist()} & {*numbers(b).flatten().tolist()}
        assert wanted == ({*numbers(common).flatten().tolist()} if common else set())
        if common:
            assert torch.equal(numbers(a)[a.slices(common)], numbers(b)[b.slices(common)])
            start, stop = a.span(common)
            flat = numbers(a).flatten()
            assert wanted <= {*flat[start:stop].tolist()}
            assert {flat[start].item(), flat[stop - 1].item()} <= wanted


@pytest.mark.parametrize("box", [((4,), (3,), (2,)), ((4,), (-1,), (2,)), ((4,), (0, 0), (1, 1))])
def test_a_box_outside_its_tensor_is_refused(box):
    with pytest.raises(CheckpointError, match="a shard lies inside its tensor"):
        Shard(*box)


def test_boxes_of_different_tensors_have_nothing_to_share():
    with pytest.raises(CheckpointError, match="have one global shape"):
        Shard.whole((3,)).intersection(Shard.whole((4,)))


def test_a_piece_has_the_shape_of_its_shard():
    with pytest.raises(CheckpointError, match=r"got \[3\] and \[4\]"):
        Piece(torch.zeros(3), Shard.whole((4,)))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_cover_is_every_element_once(shape):
    for number in range(200):
        cover = list(itertools.islice(boxes(shape, 1000), number, number + 3))
        found = sorted(itertools.chain(*(numbers(box).flatten().tolist() for box in cover)))
        exact = found == list(range(Shard.whole(shape).numel))
        assert (fault_of_cover(shape, cover) is None) == exact
    assert fault_of_cover(shape, [Shard.whole(shape)]) is None


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_replicated_state_is_written_once_and_evenly(num_ranks):
    choice = random.Random(num_ranks)
    tensors = {
        str(number): (tuple(choice.choices([1, 3, 700, 1000], k=choice.randrange(4))), 4)
        for number in range(30)
    }
    written = [0] * num_ranks
    for path, parts in divide(tensors, num_ranks).items():
        assert fault_of_cover(tensors[path][0], list(parts.values())) is None
        for rank, shard in parts.items():
            written[rank] += shard.numel * 4
    assert max(written) - min(written) <= 4 * WHOLE_BYTES + max(written) // 10


def test_copies_of_a_piece_are_written_once_by_one_that_has_it():
    left, right = Shard((4, 2), (0, 0), (2, 2)), Shard((4, 2), (2, 0), (2, 2))
    held = [{"w": left, "v": left}, {"w": left, "v": right}, {"w": right, "v": right}]
    chosen = owners(held)
    for path, parts in chosen.items():
        assert sorted(parts.values(), key=lambda shard: shard.offset) == [left, right]
        assert all(held[rank][path] == shard for rank, shard in parts.items())
