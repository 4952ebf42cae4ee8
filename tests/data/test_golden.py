"""What the first hpctrain wrote is read for ever.

``golden/plain`` was written before there were ragged and compressed fields, ``golden/kinds`` when
they had come; neither is ever written again.
"""

from pathlib import Path

import numpy as np
import pytest

from hpctrain.data.format.layout import VERSION, Manifest
from hpctrain.data.reader import ShardedDataset
from tests.data.plain import read_whole

GOLDEN = Path(__file__).parent / "golden"
NUMBERS = np.arange(20)
PLAIN = {
    "image": (NUMBERS[:, None, None] * 6 + np.arange(6).reshape(3, 2)).astype("f4"),
    "number": NUMBERS,
    "flag": NUMBERS % 3 == 0,
    "half": (NUMBERS / 4).astype("f2"),
    "bytes": (NUMBERS[:, None] * 7 % 251 * np.array([1, 2, 3]) % 256).astype("u1"),
}
KINDS = {
    "text": [np.arange(n % 4) + n for n in NUMBERS],
    "boxes": [np.full((n % 3, 4), n / 2) for n in NUMBERS],
    "packed": [np.full(5, n) for n in NUMBERS],
    "packed_text": [np.full(n % 5, n) for n in NUMBERS],
}


def test_it_has_the_version_that_is_still_written():
    assert VERSION == 1
    assert {Manifest.read(GOLDEN / name).block_size for name in ("plain", "kinds")} == {8}


@pytest.mark.parametrize(("name", "wanted"), [("plain", PLAIN), ("kinds", KINDS)])
def test_plain_h5py_finds_the_samples(name, wanted):
    read = read_whole(GOLDEN / name)
    assert read.keys() == wanted.keys()
    for field, samples in wanted.items():
        assert all(map(np.array_equal, read[field], samples))


@pytest.mark.parametrize("verify", ["first", "always", "off"])
def test_the_reader_finds_the_samples(verify):
    indices = NUMBERS[::-3]
    read = ShardedDataset(GOLDEN / "plain", verify=verify).take(indices)
    assert all(np.array_equal(read[name], array[indices]) for name, array in PLAIN.items())
    kinds = ShardedDataset(GOLDEN / "kinds", verify=verify).take(indices)
    assert np.array_equal(kinds["packed"], np.array(KINDS["packed"])[indices])
    for name in ("text", "boxes", "packed_text"):
        assert len(kinds[name]) == len(indices)
        for sample, index in zip(kinds[name], indices, strict=True):
            assert np.array_equal(sample, KINDS[name][index])
