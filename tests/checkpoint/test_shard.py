"""Check boxes of a tensor: intersections hold exactly the common elements."""

import itertools
import random

import pytest
import torch

from hpctrain.checkpoint.format.shard import Shard, TensorPiece, fault_of_cover
from hpctrain.checkpoint.saving import WHOLE_BYTES, divide
from hpctrain.core.errors import CheckpointError

SHAPES = [(), (5,), (0, 3), (4, 3), (2, 3, 4)]


def boxes(shape, number):
    choice = random.Random(0)
    for _ in range(number):
        ends = [sorted(choice.choices(range(size + 1), k=2)) for size in shape]
        yield Shard(shape, [start for start, _ in ends], [stop - start for start, stop in ends])


def numbers(shard):
    """Return the row-major numbers of the elements of a box."""
    whole = torch.arange(Shard.whole(shard.global_shape).numel).reshape(shard.global_shape)
    return whole[Shard.whole(shard.global_shape).slices(shard)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_intersection_holds_the_common_elements(shape):
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


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Shard((4,), (3,), (2,)), "a shard must be inside its tensor"),
        (lambda: Shard((4,), (-1,), (2,)), "a shard must be inside its tensor"),
        (lambda: Shard((4,), (0, 0), (1, 1)), "a shard must be inside its tensor"),
        (lambda: Shard.whole((3,)).intersection(Shard.whole((4,))), "have the same global shape"),
        (lambda: TensorPiece(torch.zeros(3), Shard.whole((4,))), r"the shard, \[4\], got \[3\]"),
    ],
)
def test_invalid_boxes_are_rejected(make, told):
    with pytest.raises(CheckpointError, match=told):
        make()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cover_has_every_element_once(shape):
    drawn = list(boxes(shape, 202))
    for number in range(200):
        cover = drawn[number : number + 3]
        found = sorted(itertools.chain(*(numbers(box).flatten().tolist() for box in cover)))
        exact = found == list(range(Shard.whole(shape).numel))
        assert (fault_of_cover(shape, cover) is None) == exact
    assert fault_of_cover(shape, [Shard.whole(shape)]) is None


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_replicated_state_is_written_once_and_evenly(num_ranks):
    choice = random.Random(num_ranks)
    tensors = {
        str(number): ("float32", tuple(choice.choices([1, 3, 700, 1000], k=choice.randrange(4))))
        for number in range(30)
    }
    written = [0] * num_ranks
    for path, parts in divide(tensors, num_ranks).items():
        assert fault_of_cover(tensors[path][1], list(parts.values())) is None
        for rank, shard in parts.items():
            written[rank] += shard.numel * 4
    assert max(written) - min(written) <= 4 * WHOLE_BYTES + max(written) // 10
