"""Checking blocks of a file: just those that differ are named, however they are asked for."""

import os
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hpctrain.core.checksum import crc32
from hpctrain.data.io import plain_blocks
from hpctrain.data.io.plain_blocks import PlainBlocks, from_file

START = 7
"""Of the field in its file."""


@pytest.fixture(scope="module", autouse=True)
def small_reads():
    patch = pytest.MonkeyPatch()
    patch.setattr(plain_blocks, "READ_BYTES", 64)  # so that runs of neighbours are cut
    yield
    patch.undo()


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    descriptor = os.open(tmp_path_factory.mktemp("blocks") / "field", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=30), data=st.data())
def test_blocks_that_differ_or_cannot_be_read_are_named(file, sizes, data):
    edges = np.cumsum([0, *sizes])
    values = np.random.default_rng(0).integers(0, 256, edges[-1], np.uint8)
    crcs = np.array([crc32(values[a:b].tobytes()) for a, b in pairwise(edges)])
    filled = [block for block, size in enumerate(sizes) if size]
    flipped = set(data.draw(st.lists(st.sampled_from(filled)))) if filled else set()
    for block in flipped:
        values[edges[block]] ^= 1
    num_bytes = data.draw(st.integers(0, int(edges[-1])))
    os.ftruncate(file, START)
    os.pwrite(file, values[:num_bytes].tobytes(), START)
    asked = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True).map(sorted))
    blocks = np.array(asked, np.int64)
    missing = {block for block in asked if sizes[block] and edges[block + 1] > num_bytes}
    read = PlainBlocks(edges, crcs, from_file(file, START))
    assert read.wrong(blocks) == sorted((flipped | missing) & {*asked})


def test_neighbours_are_read_together_and_not_more_than_is_good():
    asked = []

    def read(begin, end):
        asked.append((begin, end))
        return memoryview(bytes(end - begin))

    edges = np.arange(0, 330, 16)
    crcs = np.full(20, crc32(bytes(16)))
    assert not PlainBlocks(edges, crcs, read).wrong(np.array([0, 1, 3, 4, 5, 6, 7, 8, 12]))
    assert asked == [(0, 32), (48, 112), (112, 144), (192, 208)]
