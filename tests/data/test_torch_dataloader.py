"""Check that ``torch.utils.data.DataLoader`` gives the same samples as ``hpctrain.Loader``."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Subset

from hpctrain.data.reader import ShardedDataset
from hpctrain.data.samples import collate
from tests.data.conftest import numbered
from tests.data.mixed_set import mixed, write_mixed


def test_a_data_set_is_a_list_of_samples(dataset_of):
    dataset, whole = dataset_of(31), numbered(31)
    assert dataset[3]["number"] == dataset[-28]["number"] == 3
    assert np.array_equal(dataset[3]["image"], whole["image"][3])
    assert [sample["number"].item() for sample in dataset] == list(range(31))
    for index in (31, -32):
        with pytest.raises(IndexError, match=f"from -31 to 30, got {index}"):
            dataset[index]


@pytest.mark.parametrize("collate_fn", [None, collate])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_stock_loader_gets_the_samples(dataset_of, collate_fn, num_workers):
    loader = DataLoader(
        dataset_of(31), batch_size=8, collate_fn=collate_fn, num_workers=num_workers
    )
    batches = list(loader)
    assert [len(batch["number"]) for batch in batches] == [8, 8, 8, 7]
    for name, array in numbered(31).items():
        assert torch.equal(torch.cat([b[name] for b in batches]), torch.from_numpy(array))


def test_samples_of_others_are_collated_as_ever(dataset_of):
    batch = next(iter(DataLoader(Subset(dataset_of(31), [3, 5]), 2, collate_fn=collate)))
    assert batch["number"].tolist() == [3, 5]
    assert collate([(1, 2), (3, 4)])[0].tolist() == [1, 3]


def test_ragged_samples_stay_packed(tmp_path):
    write_mixed(tmp_path)
    dataset, whole = ShardedDataset(tmp_path), mixed(100)
    assert dataset[4]["text"].tolist() == whole["text"][4].tolist()
    (batch,) = DataLoader(dataset, batch_size=100, collate_fn=collate)
    assert batch["text"].values.tolist() == np.concatenate(whole["text"]).tolist()
