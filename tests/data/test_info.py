"""What a data set holds is told from its manifest alone."""

import pytest

from hpctrain.core.errors import DataError
from hpctrain.data.format.layout import Manifest
from hpctrain.data.tools.info import info, peek
from tests.data.mixed_set import mixed, write_mixed


@pytest.fixture(params=[None, "zstd"])
def directory(request, tmp_path):
    write_mixed(tmp_path, compression=request.param)
    return tmp_path


def test_samples_fields_and_shards_are_told(directory):
    manifest = Manifest.read(directory)
    found = info(directory)
    assert (found.num_samples, found.block_size, found.split) == (100, 7, "train")
    assert found.uuid == manifest.uuid
    assert found.created_by.startswith("hpctrain ")
    assert found.num_bytes == sum(path.stat().st_size for path in directory.glob("*.h5"))
    assert [(shard.num_samples, shard.state) for shard in found.shards] == [
        (40, "here"),
        (40, "here"),
        (20, "here"),
    ]
    fields = {field.name: field for field in found.fields}
    assert fields["image"].shape == (3, 2)
    assert fields["image"].compression == manifest.fields["image"].compression
    assert fields["image"].num_bytes == 100 * 24
    assert fields["image"].mean_length is None
    lengths = [len(sample) for sample in mixed(100)["text"]]
    assert fields["text"].mean_length == sum(lengths) / 100
    assert fields["text"].num_bytes == 4 * sum(lengths)
    assert found.classes == ()


def test_files_that_are_not_as_they_should_be_are_told_without_an_error(directory):
    first, second, _ = Manifest.read(directory).shards
    (directory / first.file).unlink()
    (directory / second.file).write_bytes(b"short")
    (directory / "classes.txt").write_text("cat\ndog\n")
    found = info(directory)
    assert [shard.state for shard in found.shards] == ["missing", "other size", "here"]
    assert found.created_by == ""
    assert found.classes == ("cat", "dog")


def test_a_sample_is_shown_with_its_shapes_and_first_values(directory):
    samples = mixed(100)
    for index in (0, 3, 44, 99):
        shown = {field.name: field for field in peek(directory, index)}
        assert shown["number"].values == [index]
        assert shown["number"].shape == ()
        assert shown["image"].shape == (3, 2)
        assert shown["image"].values == samples["image"][index].ravel().tolist()
        assert shown["text"].shape == samples["text"][index].shape
        assert shown["boxes"].shape == samples["boxes"][index].shape
        assert shown["boxes"].values == samples["boxes"][index].ravel().tolist()[:8]


def test_what_cannot_be_shown_is_told(directory, tmp_path):
    with pytest.raises(DataError, match="samples are 0 to 99, got 100"):
        peek(directory, 100)
    with pytest.raises(DataError, match="there is none in"):
        info(tmp_path / "none")
