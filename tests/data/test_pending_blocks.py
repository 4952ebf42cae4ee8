"""Blocks read ahead are read once, waited for, and told as damaged to who takes them."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from hpctrain.core.errors import CorruptError
from hpctrain.data.format.layout import Manifest
from hpctrain.data.io.open_shard import OpenShard
from tests.data.mixed_set import flip


def opened_on_disk(directory, io="read"):
    """Open the first shard, of 40 samples in blocks of 7, as from a slow disk."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpctrain.data.io.shardfile.in_memory", lambda *_: False)
        return OpenShard(directory, Manifest.read(directory), 0, io=io)


@pytest.fixture
def on_disk(directory):
    """Give the shard, open."""
    return opened_on_disk(directory)


@pytest.mark.parametrize("at_once", [1, 10**9])
def test_blocks_of_any_size_are_brought_ahead(on_disk, monkeypatch, at_once):
    monkeypatch.setattr("hpctrain.data.io.open_shard.READ_BYTES", at_once)
    monkeypatch.setattr("hpctrain.data.io.open_shard._APART_BYTES", at_once)
    monkeypatch.setattr("hpctrain.data.io.plain_blocks.READ_BYTES", at_once)
    for piece in on_disk.coming(np.array([39, 3, 20])):
        piece.read()
    assert np.flatnonzero(on_disk.file.checked).tolist() == [0, 2, 5]


def test_what_is_on_its_way_is_waited_for_and_read_once(on_disk, monkeypatch):
    read = []
    wrong_blocks = on_disk.file.wrong_blocks
    monkeypatch.setattr(
        on_disk.file, "wrong_blocks", lambda blocks: read.extend(blocks) or wrong_blocks(blocks)
    )
    pieces = on_disk.coming(np.arange(30))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(on_disk.check_blocks, np.arange(40), again=False)
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.1)
        for piece in pieces:
            piece.read()
        waiting.result()
    assert sorted(read) == [0, 1, 2, 3, 4, 5]


def test_damage_that_was_brought_ahead_is_told_to_who_takes_it(directory):
    shard = Manifest.read(directory).shards[0]
    flip(directory / shard.file, shard.places["number"].offset + 15 * 8)
    on_disk = opened_on_disk(directory)
    for piece in on_disk.coming(np.arange(40)):
        piece.read()
    assert np.flatnonzero(~on_disk.file.checked).tolist() == [2]
    with pytest.raises(CorruptError, match="samples 14 to 20"):
        on_disk.check_blocks(np.arange(40), again=False)
