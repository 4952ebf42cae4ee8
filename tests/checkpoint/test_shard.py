"""Check boxes of a tensor: intersections hold exactly the common elements."""

import itertools
import math
import random

import pytest
import torch

from hpctrain.checkpoint.format import shard as module
from hpctrain.checkpoint.format.shard import Shard, TensorPiece, fault_of_cover
from hpctrain.checkpoint.saving import WHOLE_BYTES, divide
from hpctrain.core.errors import CheckpointError
from tests.checkpoint.operations import slope

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
    ("make", "output"),
    [
        (lambda: Shard((4,), (3,), (2,)), "a shard must be inside its tensor"),
        (lambda: Shard((4,), (-1,), (2,)), "a shard must be inside its tensor"),
        (lambda: Shard((4,), (0, 0), (1, 1)), "a shard must be inside its tensor"),
        (lambda: Shard.whole((3,)).intersection(Shard.whole((4,))), "have the same global shape"),
        (lambda: TensorPiece(torch.zeros(3), Shard.whole((4,))), r"the shard, \[4\], got \[3\]"),
    ],
)
def test_invalid_boxes_are_rejected(make, output):
    with pytest.raises(CheckpointError, match=output):
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


def divided_by_all_cuts(tensors, num_ranks):
    """Divide as ``divide`` does, with the cuts of all ranks for each tensor."""
    sizes = {path: math.prod(shape) * 4 for path, (_, shape) in tensors.items()}
    total, start, divided = sum(sizes.values()), 0, {}
    for path, num_bytes in sizes.items():
        shape = tensors[path][1]
        cuts = [total * rank // num_ranks - start for rank in range(num_ranks + 1)]
        cuts = [min(max(cut, 0), num_bytes) for cut in cuts]
        shares = [stop - first for first, stop in itertools.pairwise(cuts)]
        dim = next((dim for dim, size in enumerate(shape) if size > 1), None)
        divided[path] = {shares.index(max(shares)): Shard.whole(shape)}
        if num_bytes >= WHOLE_BYTES and dim is not None:
            rows = [round(cut / (num_bytes // shape[dim])) for cut in cuts]
            divided[path] = {
                rank: Shard(
                    shape,
                    [first * (at == dim) for at in range(len(shape))],
                    [*shape[:dim], last - first, *shape[dim + 1 :]],
                )
                for rank, (first, last) in enumerate(itertools.pairwise(rows))
                if first < last
            }
        start += num_bytes
    return divided


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 64, 1000])
def test_division_equals_the_one_by_the_cuts_of_all_ranks(num_ranks):
    choice = random.Random(num_ranks)
    for _ in range(20):
        tensors = {
            str(number): (
                "float32",
                tuple(choice.choices([0, 1, 7, 300, 900], k=choice.randrange(4))),
            )
            for number in range(choice.randrange(30))
        }
        assert divide(tensors, num_ranks) == divided_by_all_cuts(tensors, num_ranks)


def cut_up(shape, number, choice):
    """Return boxes that cover a tensor once: the whole one, cut in two ``number`` times."""
    parts = [Shard.whole(shape)]
    for _ in range(number):
        part = parts.pop(choice.randrange(len(parts)))
        dim = choice.randrange(len(shape))
        at = choice.randint(0, part.shape[dim])
        for first, size in ((0, at), (at, part.shape[dim] - at)):
            offset, sizes = list(part.offset), list(part.shape)
            offset[dim] += first
            sizes[dim] = size
            parts.append(Shard(shape, offset, sizes))
    return parts


@pytest.mark.parametrize("shape", [(40,), (12, 9), (5, 6, 4), (3, 1, 2, 4)], ids=str)
def test_cover_is_judged_as_by_comparing_all_pairs(shape):
    choice = random.Random(len(shape))
    for _ in range(200):
        parts = cut_up(shape, choice.randrange(40), choice)
        assert fault_of_cover(shape, parts) is None
        number = choice.randrange(len(parts))
        start = [
            choice.randint(0, n - size) for n, size in zip(shape, parts[number].shape, strict=True)
        ]
        parts[number] = Shard(shape, start, parts[number].shape)
        filled = [part for part in parts if part.numel]
        assert fault_of_cover(shape, parts) == module._overlap(filled)


def test_cover_by_more_dimensions_than_parts_is_judged_in_time():
    shape = (2,) * 40
    parts = [Shard.whole(shape)]
    for dim in range(40):
        last = parts.pop()
        for at in (0, 1):
            offset, sizes = list(last.offset), list(last.shape)
            offset[dim], sizes[dim] = at, 1
            parts.append(Shard(shape, offset, sizes))
    assert fault_of_cover(shape, parts) is None
    parts[3] = Shard(shape, [0] * 40, parts[3].shape)
    assert "overlap" in fault_of_cover(shape, parts)


def test_operations_of_a_division_grow_with_tensors_and_ranks_not_with_their_product():
    def model(size):
        return {str(number): ("float32", (1000, 400)) for number in range(size)}, size

    assert slope(divide, model, 200) < 1.1


def rows_of(num):
    return (num, 3), [Shard((num, 3), (row, 0), (1, 3)) for row in range(num)]


def columns_of(num):
    return (3, num), [Shard((3, num), (0, col), (3, 1)) for col in range(num)]


def squares_of(num):
    cells = itertools.product(range(0, num, 8), range(8))
    return (num, 8), [Shard((num, 8), (row, col), (8, 1)) for row, col in cells]


@pytest.mark.parametrize("of_size", [rows_of, columns_of, squares_of])
def test_operations_of_the_check_of_a_cover_grow_with_its_parts(of_size, monkeypatch):
    monkeypatch.setattr(module, "_overlap", None)  # compares all pairs
    assert slope(fault_of_cover, of_size, 512) < 1.1
