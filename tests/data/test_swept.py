"""A data set that memory has room for is read whole, by its maps; the bytes are the same."""

import numpy as np
import pytest

from hpctrain.core.errors import CorruptError
from hpctrain.data.format.layout import Manifest
from hpctrain.data.io import open_files
from hpctrain.data.io.mapped import PAGE_BYTES, Space
from hpctrain.data.io.open_shard import OpenShard
from hpctrain.data.loader import Loader
from hpctrain.data.order.window_shape import WindowShape
from hpctrain.data.reader import ShardedDataset
from tests.data.conftest import numbered
from tests.data.mixed_set import flip


@pytest.fixture(autouse=True)
def not_in_memory(monkeypatch):
    """Let no file seem to lie in the page cache, where writing has left them."""
    for module in ("shardfile", "joined_map"):
        monkeypatch.setattr(f"hpctrain.data.io.{module}.in_memory", lambda *_: False)


@pytest.fixture(params=[True, False], ids=["brought", "not to be brought"])
def brings(request, monkeypatch):
    """Tell whether the system can bring what is mapped."""
    if not request.param:
        monkeypatch.setattr(Space, "bring", lambda *_: False)
    return request.param


@pytest.mark.usefixtures("brings")
@pytest.mark.parametrize("whole_blocks", [True, False])
@pytest.mark.parametrize(
    ("rows", "is_swept"), [([3], False), ([39, 3], True), ([*range(40)], True)]
)
def test_a_file_is_swept_where_much_of_it_is_wanted(directory, rows, is_swept, whole_blocks):
    shard = OpenShard(directory, Manifest.read(directory), 0, io="keep")  # 6 blocks of 7 samples
    for piece in shard.coming(np.array(rows), whole_blocks=whole_blocks):
        piece.read()
    assert shard.file.is_swept == is_swept
    checked = sorted({row // 7 for row in rows}) if whole_blocks else []
    assert np.flatnonzero(shard.file.checked).tolist() == checked
    shard.check_blocks(np.arange(40), again=False)
    assert shard.file.all_checked
    for piece in shard.coming(np.arange(40)):  # once more, and nothing is checked again
        piece.read()


@pytest.mark.usefixtures("brings")
@pytest.mark.parametrize(
    "order", [{"order": "global"}, {"window": WindowShape(block=7, window=2, lanes=2)}]
)
def test_an_epoch_of_a_set_that_is_read_whole_has_every_sample(directory, order):
    dataset = ShardedDataset(directory)
    assert dataset.best_read_whole
    image = numbered(100)["image"]
    found = []
    for batch in Loader(dataset, global_batch=8, **order):
        assert np.array_equal(batch["image"], image[batch["number"]])
        found += batch["number"].tolist()
    assert sorted(found) == [*range(100)]


@pytest.mark.usefixtures("brings")
def test_damage_in_a_set_that_is_read_whole_is_told(directory):
    shard = Manifest.read(directory).shards[0]
    flip(directory / shard.file, shard.places["image"].offset + 15 * 24)
    with pytest.raises(CorruptError, match="samples 14 to 20"):
        list(Loader(ShardedDataset(directory), global_batch=8))


@pytest.mark.usefixtures("brings")
def test_a_shard_truncated_while_open_is_told(directory):
    dataset = ShardedDataset(directory)
    dataset.take([0, 40, 99])
    path = directory / dataset.manifest.shards[1].file
    with path.open("r+b") as file:
        file.truncate(4096)
    with pytest.raises(CorruptError, match="truncated or replaced"):
        list(Loader(dataset, global_batch=8))


def test_a_set_is_not_read_whole_where_there_is_no_room_or_another_wish(directory, monkeypatch):
    assert not ShardedDataset(directory, io="read").best_read_whole
    monkeypatch.setattr(open_files, "available_bytes", lambda: 1000)
    assert not ShardedDataset(directory).best_read_whole


def test_what_is_not_there_cannot_be_brought(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(3 * PAGE_BYTES))
    space = Space(3 * PAGE_BYTES)
    with path.open("r+b") as file:
        space.map_file(0, file.fileno(), 0, 3 * PAGE_BYTES)
        assert space.bring(5, 3 * PAGE_BYTES - 5)
        file.truncate(PAGE_BYTES)
        assert space.bring(0, PAGE_BYTES)
        assert not space.bring(PAGE_BYTES, 1)
