"""Pieces of a file and rows of an array arrive at their places; blocks that differ are named."""

import os
import random
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.checksum import crc32
from hpctrain.data.io import mapped, values
from hpctrain.data.io.mapped import PlainBlocks, from_file
from hpctrain.data.io.values import ChunkCache, take_rows


@pytest.fixture
def file(tmp_path):
    """Give an open file of 10 000 bytes, and what it holds."""
    data = random.Random(0).randbytes(10_000)
    (tmp_path / "file").write_bytes(data)
    descriptor = os.open(tmp_path / "file", os.O_RDONLY)
    yield descriptor, data
    os.close(descriptor)


@pytest.mark.parametrize("max_buffers", [1, 3, 512])
def test_pieces_arrive_at_their_places(file, monkeypatch, max_buffers):
    monkeypatch.setattr(values, "_MAX_BUFFERS", max_buffers)
    descriptor, data = file
    dice = random.Random(1)
    for _ in range(50):
        cuts = sorted(dice.sample(range(10_000), 20))
        pieces = [(a, b - a) for a, b in pairwise(cuts) if dice.random() < 0.8]
        pieces += pieces[:2]
        dice.shuffle(pieces)
        expected = b"".join(data[at : at + size] for at, size in pieces)
        places = np.cumsum([0, *(size for _, size in pieces)]).tolist()
        out = bytearray(len(expected))
        triples = [(*piece, place) for piece, place in zip(pieces, places, strict=False)]
        values.read_pieces(descriptor, triples, memoryview(out))
        assert out == expected


def test_a_call_that_reads_less_goes_on(file, monkeypatch):
    descriptor, data = file
    real = os.preadv

    def read_little(number, buffers, offset):
        return real(number, [next(b for b in buffers if len(b))[:700]], offset)

    monkeypatch.setattr(os, "preadv", read_little)
    out = bytearray(9000)
    values.read_pieces(descriptor, [(0, 4000, 5000), (4000, 5000, 0)], memoryview(out))
    assert out == data[4000:9000] + data[:4000]


def test_the_end_of_a_file_is_told(file):
    with pytest.raises(OSError, match="ends before its data"):
        values.read_at(file[0], 9_990, 11)
    assert values.read_at(file[0], 9_990, 10).tobytes() == file[1][-10:]


def test_a_chunk_is_decoded_once_while_it_fits():
    cache, decoded = ChunkCache(max_bytes=800), []

    def get(home):
        def decode():
            decoded.append(home)
            return np.full(50, home)

        return cache.get((0, home), decode)[0]

    assert [get(home) for home in (1, 2, 1, 3, 1, 2)] == [1, 2, 1, 3, 1, 2]
    assert decoded == [1, 2, 3, 2]


NUM_ROWS = 300


@pytest.fixture(scope="module", autouse=True)
def little_at_once():
    patch = pytest.MonkeyPatch()
    patch.setattr(values, "_FETCHED", 1024)  # so that rows are fetched in several pieces
    patch.setattr(mapped, "READ_BYTES", 64)  # and runs of neighbours are cut
    yield
    patch.undo()


@settings(max_examples=60, deadline=None)
@given(
    shape=st.sampled_from([(), (7,), (255, 4), (16, 16, 4), (8192,), (8193,), (0,)]),
    dtype=st.sampled_from(["u1", "<f4", "?"]),
    num_wanted=st.sampled_from([0, 1, 5, 1023, 1024, 1025, 2500]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rows_are_copied_to_their_places(shape, dtype, num_wanted, seed):
    generator = np.random.default_rng(seed)
    source = generator.integers(0, 2, (NUM_ROWS, *shape)).astype(dtype)
    rows = generator.integers(0, NUM_ROWS, num_wanted)
    out = np.full((num_wanted, *shape), 9).astype(dtype)
    take_rows(source, rows, out)
    assert np.array_equal(out, source[rows])


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30), data=st.data())
def test_blocks_that_differ_or_cannot_be_read_are_named(sizes, data):
    edges = np.cumsum([0, *sizes])
    values = np.random.default_rng(0).integers(0, 256, edges[-1], np.uint8)
    crcs = np.array([crc32(values[a:b].tobytes()) for a, b in pairwise(edges)])
    filled = [block for block, size in enumerate(sizes) if size]
    flipped = set(data.draw(st.lists(st.sampled_from(filled)))) if filled else set()
    for block in flipped:
        values[edges[block]] ^= 1
    num_bytes = data.draw(st.integers(0, int(edges[-1])))
    file = os.memfd_create("blocks")
    os.pwrite(file, values[:num_bytes].tobytes(), 7)
    asked = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True).map(sorted))
    blocks = np.array(asked, np.int64)
    missing = {block for block in asked if sizes[block] and edges[block + 1] > num_bytes}
    found = PlainBlocks(edges, crcs, from_file(file, 7)).wrong(blocks)
    os.close(file)
    assert found == sorted((flipped | missing) & {*asked})
