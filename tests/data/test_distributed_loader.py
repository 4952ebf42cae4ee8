"""Check ``shard_data``: the ranks together read the batches that one process would read."""

import multiprocessing
import tracemalloc
from itertools import chain

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    ConcatDataset,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    random_split,
)

import hpctrain
from hpctrain.core.errors import ConfigError, DataError, MismatchError
from hpctrain.data import distributed_loader

RANKS = pytest.mark.ranks(1, 2, 3, 4)


class Numbers(Dataset):
    """Hold the samples 0, 1, 2, ..."""

    def __init__(self, length=22):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return float(index)


class Counting(IterableDataset):
    """Yield the samples of ``Numbers`` in order; the workers of a loader divide the samples."""

    def __init__(self, length=22):
        self.length = length

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        start, step = (info.id, info.num_workers) if info else (0, 1)
        return map(float, range(start, self.length, step))


class Notes:
    """Replace an optimizer, and record its arguments."""

    def __init__(self):
        self.counts = []

    def set_num_samples(self, num_samples, nominal=1.0):
        self.counts.append((num_samples, nominal))


@pytest.fixture(autouse=True)
def _world():
    hpctrain.init()
    yield
    hpctrain.shutdown()


def shuffled(**settings):
    generator = torch.Generator().manual_seed(7)
    return DataLoader(Numbers(), batch_size=5, shuffle=True, generator=generator, **settings)


LOADERS = {
    "in order": lambda: DataLoader(Numbers(), batch_size=5),
    "shuffled": shuffled,
    "shuffled by workers": lambda: shuffled(num_workers=1, persistent_workers=True),
    "drop_last": lambda: shuffled(drop_last=True),
    "weighted": lambda: DataLoader(
        Numbers(),
        batch_size=4,
        sampler=WeightedRandomSampler(
            [1.0, 2.0] * 11, 18, generator=torch.Generator().manual_seed(1)
        ),
    ),
    "batches of its own": lambda: DataLoader(
        Numbers(), batch_sampler=[[3, 1], [0, 2, 4, 6, 8], [5]], collate_fn=tuple
    ),
    "iterated": lambda: DataLoader(Counting(), batch_size=5),
    "iterated by workers": lambda: DataLoader(Counting(), batch_size=5, num_workers=1),
    "iterated, drop_last": lambda: DataLoader(Counting(), batch_size=5, drop_last=True),
}


def joined(lists):
    return list(chain.from_iterable(lists))


def as_list(batch):
    return [float(number) for number in batch]


@RANKS
@pytest.mark.parametrize("name", LOADERS)
def test_the_ranks_see_the_batches_of_one_process_in_every_epoch(world, name):
    if "workers" in name and world.size > 2:
        return  # two ranks are sufficient, because processes start slowly
    plain, notes = LOADERS[name](), Notes()
    loader = hpctrain.shard_data(LOADERS[name](), notes)
    torch.manual_seed(world.rank)  # the global generators of ranks differ
    for epoch in range(2):
        expected = [as_list(batch) for batch in plain] if world.rank == 0 else None
        expected = world.bcast(expected)
        if world.rank == 0:
            torch.manual_seed(0)
        notes.counts.clear()
        mine = [as_list(batch) for batch in loader]
        if world.size == 1:
            assert mine == expected
            continue
        assert len(mine) == len(expected)
        counts = [count for count, _ in notes.counts]
        parts = world.allgather([batch[:n] for batch, n in zip(mine, counts, strict=True)])
        for step, batch in enumerate(expected):
            together = [part[step] for part in parts]
            assert sorted(joined(together)) == sorted(batch), (epoch, step)
            sizes = [len(part) for part in together]
            assert max(sizes) - min(sizes) <= 1
    if "iterated" not in name:
        assert len(loader) == len(plain)


@RANKS
def test_an_order_from_the_global_generator_is_that_of_rank_0_and_new_in_each_epoch(world):
    torch.manual_seed(3)
    plain = DataLoader(Numbers(), batch_size=4, shuffle=True)
    expected = [[as_list(batch) for batch in plain] for _ in range(2)]
    assert expected[0] != expected[1]
    torch.manual_seed(3 + world.rank)
    loader = hpctrain.shard_data(DataLoader(Numbers(), batch_size=4, shuffle=True))
    with torch.no_grad():
        seen = world.allgather([[as_list(batch) for batch in loader] for _ in range(2)])
    for epoch in range(2):
        for step, batch in enumerate(expected[epoch]):
            parts = [each[epoch][step] for each in seen if step < len(each[epoch])]
            assert sorted(joined(parts)) == sorted(batch)


class Regression(Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, index):
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x, x.sum() ** 2


def train(distributed):
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(7)
    loader = DataLoader(Regression(), batch_size=7, shuffle=True, generator=generator)
    if distributed:
        optimizer = hpctrain.DistributedOptimizer(optimizer, model.named_parameters())
        hpctrain.broadcast_parameters(model.state_dict(), root_rank=0)
        loader = hpctrain.shard_data(loader, optimizer)
    for _ in range(3):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x.double())[:, 0], y.double()).backward()
            optimizer.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@RANKS
def test_training_by_the_lines_of_the_readme_equals_one_process():
    """22 = 3 * 7 + 1: neither 7 nor 1 is divisible by 2, 3 or 4, and some ranks get no sample."""
    torch.testing.assert_close(train(distributed=True), train(distributed=False))


@RANKS
@pytest.mark.parametrize("make", [Numbers, Counting])
def test_a_data_set_is_divided_into_parts_of_equal_length(world, make):
    part = hpctrain.shard_data(make(22))
    seen = [part[i] for i in range(len(part))] if make is Numbers else list(part)
    seen = world.allgather([int(number) for number in seen])
    assert len({len(numbers) for numbers in seen}) == 1
    whole = 22 if make is Numbers else 22 // world.size * world.size
    assert set(joined(seen)) == set(range(whole))
    assert sum(map(len, seen)) - whole < world.size


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_epoch_that_is_left_early_does_not_change_the_weights_of_the_next(world, num_workers):
    notes, batches = Notes(), [range(7)[first : first + 5] for first in (0, 5)]
    loader = DataLoader(TensorDataset(torch.arange(7)), batch_size=5, num_workers=num_workers)
    loader = hpctrain.shard_data(loader, notes)
    next(iter(loader))
    notes.counts.clear()
    assert len([*loader]) == 2
    own = [len(each[world.rank :: world.size]) for each in batches]
    assert [num_samples for num_samples, _ in notes.counts] == own


@pytest.mark.ranks(2, 3, 4)
def test_streams_without_batches_are_dealt_round_robin_and_unequal_ones_end_together(world):
    part = hpctrain.shard_data(Counting(11))
    seen = world.allgather(list(DataLoader(part, batch_size=None)))
    steps = 11 // world.size
    assert [len(numbers) for numbers in seen] == [steps] * world.size
    assert sorted(joined(seen)) == list(range(steps * world.size))
    loader = hpctrain.shard_data(
        DataLoader(Counting(40 - 10 * world.rank), batch_size=12), Notes()
    )
    assert len(list(loader)) == -(-(40 - 10 * (world.size - 1)) // 12)


@pytest.mark.ranks(2, 3)
def test_a_rank_with_other_floating_point_numbers_is_reported(world, caplog):
    for seed, is_reported in ((0, False), (world.rank, world.rank == 0)):
        samples = torch.rand(2, 20, generator=torch.Generator().manual_seed(seed))
        hpctrain.shard_data(TensorDataset(samples.T[::2]))
        assert caplog.text.count("TensorDataset.tensors.0 with the checksums") == is_reported


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("make", [Numbers, Counting])
def test_uneven_batches_without_weights_are_rejected_except_in_evaluation(world, make):
    loader = hpctrain.shard_data(DataLoader(make(world.size * 4 + 1), batch_size=world.size * 2))
    with pytest.raises(
        ConfigError, match=r"got a batch of 1 for .*shard_data\(loader, optimizer\)"
    ):
        list(loader)
    with torch.no_grad():
        seen = world.allgather(joined(map(as_list, loader)))
    assert sorted(joined(seen)) == list(range(world.size * 4 + 1))


class Own(DataLoader):
    def __iter__(self):
        return iter(())


NUMBERS = Numbers()
REFUSED = {
    "divided": lambda: DataLoader(
        NUMBERS, batch_size=2, sampler=DistributedSampler(NUMBERS, 2, 0)
    ),
    "in batches": lambda: DataLoader(
        NUMBERS, batch_sampler=BatchSampler(DistributedSampler(NUMBERS, 2, 0), 2, drop_last=False)
    ),
    "elastic": lambda: DataLoader(NUMBERS, sampler=hpctrain.elastic.ElasticSampler(NUMBERS)),
    "must not override __iter__": lambda: Own(NUMBERS),
    "batch_size=None": lambda: DataLoader(NUMBERS, batch_size=None),
    "every size\\(\\)-th batch": lambda: DataLoader(Counting(9), batch_size=None),
    "shard_data\\(\\) must get": lambda: 3,
}


@RANKS
@pytest.mark.parametrize("why", REFUSED)
def test_unsupported_loaders_raise_on_every_rank(world, why):
    text = "already divided among the ranks" if why in ("in batches", "elastic") else why
    wrong = world.rank == world.size - 1
    with pytest.raises(MismatchError, match=text):
        hpctrain.shard_data(REFUSED[why]() if wrong else DataLoader(NUMBERS))


@RANKS
def test_different_data_and_a_plain_optimizer_are_refused_on_every_rank(world):
    plain = torch.optim.SGD([torch.ones(1)], lr=0.1)
    with pytest.raises(MismatchError, match=r"DistributedOptimizer, .* got SGD; wrap it"):
        hpctrain.shard_data(DataLoader(NUMBERS), plain)
    if world.size > 1:
        with pytest.raises(MismatchError, match=r"the same data on every rank, got rank"):
            hpctrain.shard_data(Numbers(20 + world.rank))


class Labelled(Dataset):
    def __init__(self, seed):
        self.labels = torch.randperm(100, generator=torch.Generator().manual_seed(seed))
        self.noise = torch.rand(4, generator=torch.Generator().manual_seed(seed))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return self.labels[index]


def split(seed):
    return random_split(NUMBERS, [20, 2], generator=torch.Generator().manual_seed(seed))[0]


OTHERS = {
    "Subset.indices": split,
    "DataLoader.dataset.indices": lambda seed: DataLoader(split(seed)),
    "ConcatDataset.datasets.1.labels": lambda seed: ConcatDataset([Numbers(100), Labelled(seed)]),
    "TensorDataset.tensors.1": lambda seed: TensorDataset(torch.ones(100), Labelled(seed).labels),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", OTHERS)
def test_other_samples_or_another_order_on_a_rank_are_an_error_on_every_rank(world, name):
    hpctrain.shard_data(OTHERS[name](5))
    with pytest.raises(MismatchError, match=rf"got {name} with the checksums rank.*same seed"):
        hpctrain.shard_data(OTHERS[name](int(world.rank == 1)))
    data = Labelled(0)
    data.noise += world.rank  # numbers that may round differently are not compared
    assert hpctrain.shard_data(DataLoader(data, batch_size=2 * world.size))


class Of(IterableDataset):
    """Yield the samples that ``make`` contains or returns."""

    def __init__(self, make):
        self.make = make

    def __iter__(self):
        return map(self.make, range(10))


SAMPLES = {
    "tensor without dimension": torch.tensor,
    "tensor": lambda number: torch.tensor([number, 1]),
    "tensor of floats": lambda number: torch.tensor(float(number)),
    "array without dimension": np.array,
    "number of numpy": np.int64,
    "float of numpy": np.float32,
    "float": float,
    "int": int,
    "text": str,
    "bytes": lambda number: b"%d" % number,
    "None": lambda _: None,
    "object": lambda _: object,
    "iterator": lambda number: iter([number]),
    "nested": lambda number: {"x": (torch.tensor(number), None), "y": np.array(number)},
}


@pytest.mark.ranks(2, 3)
def test_samples_of_a_stream_may_be_any_objects(world, caplog):
    for name, make in SAMPLES.items():
        kept = [] if name == "iterator" else [make(number) for number in range(10)]
        data = Of(make)
        with torch.no_grad():
            loader = hpctrain.shard_data(DataLoader(data, batch_size=4, collate_fn=list))
            mine = joined(loader)
        if name == "iterator":  # the comparison of samples does not consume it
            mine, kept = joined(mine), [*range(10)]
        expected = joined(kept[at : at + 4][world.rank :: world.size] for at in (0, 4, 8))
        assert list(map(repr, mine)) == list(map(repr, expected)), name
    assert "differ" not in caplog.text
    # Without noise, another order is detected.
    for name in ("tensor without dimension", "array without dimension", "number of numpy", "text"):
        caplog.clear()
        data = Of(lambda number, make=SAMPLES[name]: make(number + world.rank))
        with torch.no_grad():
            list(hpctrain.shard_data(DataLoader(data, batch_size=4, collate_fn=list)))
        assert caplog.text.count("the first batches differ") == (world.rank == 0), name


class Streamed(IterableDataset):
    """Yield noise that differs between ranks, and a number."""

    def __init__(self, noise, step):
        self.noise, self.step = noise, step

    def __iter__(self):
        numbers = range(int(self.noise) % self.step, 36, self.step)
        return ((torch.full((3,), self.noise), number) for number in numbers)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("num_workers", [0, 1])
def test_stream_that_divides_itself_is_reported(world, num_workers, caplog):
    rank, size = world.rank, world.size
    for step, output in ((1, 0), (size, rank == 0)):
        data = Streamed(float(rank), step)
        loader = hpctrain.shard_data(DataLoader(data, batch_size=size, num_workers=num_workers))
        for _ in range(2):
            list(loader)
        assert caplog.text.count("the first batches differ") == output


@pytest.mark.ranks(2, 3)
def test_a_short_batch_among_passes_and_a_sampler_that_fails_are_errors_on_every_rank(world):
    model = nn.Linear(1, 1)
    wrapped = hpctrain.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), backward_passes_per_step=2
    )
    loader = hpctrain.shard_data(DataLoader(Numbers(22), batch_size=4), wrapped)
    with pytest.raises(ConfigError, match=r"got a batch of 2 samples with batch_size 4"):
        iter(loader)
    wrapped.set_backward_passes_per_step(1)
    assert len(list(loader)) == 6

    class Failing:
        def __iter__(self):
            yield [0, 1]
            raise ValueError("no more")

    loader = hpctrain.shard_data(DataLoader(NUMBERS, batch_sampler=Failing()), Notes())
    with pytest.raises(
        DataError, match="rank 0 cannot draw the order of an epoch: ValueError: no more"
    ):
        list(loader)
    assert world.allgather(0) == [0] * world.size


@RANKS
def test_a_loader_keeps_what_it_was_made_with():
    settings = {
        "batch_size": 12,
        "drop_last": True,
        "num_workers": 1,
        "collate_fn": joined,
        "worker_init_fn": as_list,
        "timeout": 5,
        "prefetch_factor": 4,
        "persistent_workers": True,
        "multiprocessing_context": multiprocessing.get_context("fork"),
        "generator": torch.Generator(),
    }
    plain = DataLoader(NUMBERS, **settings)
    loader = hpctrain.shard_data(plain, Notes())
    for name in (*settings, "dataset", "pin_memory", "sampler"):
        assert getattr(loader, name) == getattr(plain, name), name
    assert len(loader) == len(plain) == 1


@pytest.mark.ranks(2, 3)
def test_a_rank_keeps_the_indices_of_its_own_samples_only(world):
    total, integer_bytes = 400_000, 32 + 8  # size of an integer, and of its place in a list
    loader = hpctrain.shard_data(DataLoader(Numbers(total), batch_size=40_000), Notes())
    tracemalloc.start()
    try:
        order = iter(loader.batch_sampler)
        next(order)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert len(list(order)) == 9
    assert world.rank == 0 or kept < 1.25 * total / world.size * integer_bytes


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("of_samples", [int, str, lambda number: (number, "x"), np.int64])
def test_an_order_that_comes_in_several_pieces_is_the_same(world, monkeypatch, of_samples):
    batches = [list(map(of_samples, range(size, 2 * size))) for size in (3, 4, 7, 1, 2, 3)]
    seen = {}
    for limit in (1, 7, 1 << 20):
        monkeypatch.setattr(distributed_loader, "INDICES_PER_MESSAGE", limit)
        loader = hpctrain.shard_data(DataLoader(NUMBERS, batch_sampler=batches), Notes())
        seen[limit] = list(loader.batch_sampler)
    own = [batch[world.rank :: world.size] or batch[:1] for batch in batches]
    assert list(map(repr, own)) == list(map(repr, seen[1]))
    assert seen[1] == seen[7] == seen[1 << 20]
