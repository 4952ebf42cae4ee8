"""Check the description of a data set, which needs only the manifest."""

import numpy as np
import pytest

from hpctrain.core.errors import DataError
from hpctrain.data.format.dataset_manifest import Manifest
from hpctrain.data.tools.info import info, peek
from tests.data.mixed_set import mixed, write_mixed


@pytest.fixture(params=[None, "zstd"])
def directory(request, tmp_path):
    write_mixed(tmp_path, compression=request.param)
    return tmp_path


def test_samples_fields_and_shards_are_reported_also_for_missing_files(directory):
    manifest, found = Manifest.read(directory), info(directory)
    about = (found["uuid"], found["num_samples"], found["block_size"], found["split"])
    assert about == (manifest.uuid, 100, 7, "train")
    assert found["created_by"].startswith("hpctrain ")
    assert found["num_bytes"] == sum(path.stat().st_size for path in directory.glob("*.h5"))
    shards = [(shard["num_samples"], shard["state"]) for shard in found["shards"]]
    assert shards == [(40, "here"), (40, "here"), (20, "here")]
    image, *_, text, _ = found["fields"]
    assert (image["shape"], image["num_bytes"], image["mean_length"]) == ((3, 2), 2400, None)
    assert image["compression"] == manifest.fields["image"].compression
    total = sum(map(len, mixed(100)["text"]))
    assert (text["mean_length"], text["num_bytes"]) == (total / 100, 4 * total)
    assert found["classes"] == ()
    (directory / manifest.shards[0].file).unlink()
    (directory / manifest.shards[1].file).write_bytes(b"short")
    (directory / "classes.txt").write_text("cat\ndog\n")
    found = info(directory)
    assert [shard["state"] for shard in found["shards"]] == ["missing", "other size", "here"]
    assert (found["created_by"], found["classes"]) == ("", ("cat", "dog"))


def test_a_sample_is_shown_with_its_shapes_and_first_values(directory, tmp_path):
    samples = mixed(100)
    for index in (0, 44, 99):
        for field in peek(directory, index):
            wanted = np.asarray(samples[field["name"]][index])
            assert (field["shape"], field["values"]) == (wanted.shape, wanted.ravel().tolist()[:8])
    with pytest.raises(DataError, match="must be from 0 to 99, got 100"):
        peek(directory, 100)
    with pytest.raises(DataError, match="has none"):
        info(tmp_path / "none")
