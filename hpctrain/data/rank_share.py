"""This rank's part of a plain data set or ``DataLoader``: ``hpctrain.shard``."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from itertools import count, islice
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler, Subset

from hpctrain.collectives.allreduce import allreduce
from hpctrain.collectives.objects import allgather_object, broadcast_object
from hpctrain.comm.agreement import raise_if_any
from hpctrain.core.checksum import crc32
from hpctrain.core.errors import ConfigError, DataError, MismatchError
from hpctrain.core.logs import logger
from hpctrain.core.units import by_rank
from hpctrain.data.loader import Loader
from hpctrain.negotiation.request import Min
from hpctrain.runtime.world import current

T = TypeVar("T", bound="Dataset[Any] | DataLoader[Any]")

_NUMBERS = count(1)
"""Of loaders, for reports of ranks that wait; all ranks make theirs in the same order."""


class Counts(Protocol):
    """What takes sample counts: a ``DistributedOptimizer`` or a local method."""

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Say how many samples this rank's loss is the mean of."""


def shard(data: T, optimizer: Counts | None = None) -> T:
    """Return this rank's part of a ``DataLoader`` or of a data set. Collective.

    Of a loader the ranks see together what one process with it would see: the same samples in
    each step, in an order that rank 0 draws anew for every epoch. Its batch is that of all ranks,
    and each takes every ``size()``-th sample of it. Everything else is as in ``loader``: workers,
    ``collate_fn``, ``len()``. All ranks begin their epochs together.

    Of a data set a rank gets every ``size()``-th sample; where they do not divide evenly, first
    ones come twice, as of torch's ``DistributedSampler``. One that is iterated leaves out an
    incomplete round at its end.

    An ``IterableDataset``, by itself or in a loader, is read whole by every rank, of which each
    keeps its part: it must give all ranks the same samples in the same order. An epoch of a loader
    ends on all ranks with the first that has no batch.

    Args:
        data: as one process would use it.
        optimizer: is told by ``set_num_samples`` what each batch counts, so that the average of
            gradients is exact where ranks have unequally many samples. A rank without any gets
            one that counts nothing. Without an optimizer that is an error, but below
            ``torch.no_grad()``: there a rank without samples gets no batch.

    Raises:
        MismatchError: ``data`` is divided already, cannot be divided or differs between ranks, as
            by a random split with another seed on each; on every rank.
        ConfigError: several backward passes make a step, and the last batch is a shorter one.

    Where this differs from one process: each rank draws its own random numbers for transforms.
    """
    topology = current().topology
    refusal = _refusal(data, optimizer)
    facts = f"{type(data).__name__} {_length(data)} {getattr(data, 'batch_size', None)}"
    facts = f"{facts}, {'with' if optimizer else 'without'} an optimizer"
    heard = allgather_object((refusal, facts, identity_of(data)), name="shard")
    refusals, all_facts, identities = zip(*heard, strict=True)
    raise_if_any(refusals)
    if len(set(all_facts)) > 1:
        raise MismatchError(
            f"shard() takes the same on every rank, got {by_rank(all_facts)}; let every rank open "
            "the same data"
        )
    _compare(identities)
    rank, size = topology.rank, topology.size
    if size == 1:
        return data
    if isinstance(data, DataLoader):
        made = StreamLoader if isinstance(data.dataset, IterableDataset) else SharedLoader
        name = f"the loader of shard() call {next(_NUMBERS)}"
        tell = _Teller(optimizer, data.batch_size, size)
        return made(data, rank, size, tell, name)  # type: ignore[return-value]
    if isinstance(data, IterableDataset):
        return _StreamPart(data, rank, size)  # type: ignore[return-value]
    return _part(data, rank, size)  # type: ignore[return-value]


def _compare(identities: Sequence[Mapping[str, str]]) -> None:
    """Refuse data sets that hold other samples, or the same in another order.

    Where their floating point numbers differ, which processors may round differently, warn.
    """
    for name in identities[0]:
        of_ranks = [one.get(name, "") for one in identities]
        if len(set(of_ranks)) == 1:
            continue
        text = (
            f"shard() divides the same data set on every rank, got {name} with the checksums "
            f"{by_rank(of_ranks)}; split and shuffle it with the same seed on every rank, as "
            "in random_split(data, sizes, generator=torch.Generator().manual_seed(0)); one "
            "that holds a part for each rank needs no shard()"
        )
        if not of_ranks[0].startswith(_OF_FLOATS):
            raise MismatchError(text)
        if current().topology.rank == 0:
            logger.warning(text)


def _refusal(data: object, optimizer: object) -> str | None:
    """Say why this cannot be divided, or need not be."""
    kind = type(data).__name__
    if isinstance(data, Loader | SharedLoader | StreamLoader):
        return f"{kind} is divided among the ranks already; leave shard() out"
    if optimizer is not None and not hasattr(optimizer, "set_num_samples"):
        return (
            f"shard() tells a DistributedOptimizer, or what hvd.LocalSGD() and its like return, "
            f"what a batch counts, got {type(optimizer).__name__}; wrap it first, or give "
            f"shard(loader, method) inside `with hvd.LocalSGD(model, optimizer, ...) as method`"
        )
    if isinstance(data, DataLoader):
        return _refusal_of_loader(data)
    if isinstance(data, IterableDataset) or (_length(data) and hasattr(data, "__getitem__")):
        return None
    return f"shard() takes a torch DataLoader or a data set with samples, got {kind}"


def _refusal_of_loader(loader: "DataLoader[Any]") -> str | None:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", 0))
    if any(hasattr(it, "num_replicas") for it in samplers):
        return (
            "this DataLoader is divided among the ranks already, by its sampler; "
            "leave shard() out, or give the DataLoader a sampler for one process"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        kind = type(loader).__name__
        return f"{kind} iterates in a way of its own; divide its data set: shard(loader.dataset)"
    if loader.batch_size is None and loader.batch_sampler is None:
        return (
            "a DataLoader with batch_size=None gives batches that only its data set can divide; "
            "give it samples and a batch_size, or let each rank take whole batches in turn, "
            "size() of them in a step: DataLoader(shard(dataset), batch_size=None)"
        )
    return None


def _length(data: object) -> int | None:
    try:
        return len(data)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return None


def _part(dataset: "Dataset[Any]", rank: int, size: int) -> "Subset[Any]":
    total = _length(dataset) or 0
    steps = -(-total // size)
    if total % size and rank == 0:
        logger.info("%d samples on %d ranks: %d come twice", total, size, steps * size - total)
    return Subset(dataset, [(rank + step * size) % total for step in range(steps)])


class _StreamPart(IterableDataset[Any]):
    """Every ``size``-th sample of an iterable data set, of complete rounds."""

    def __init__(self, dataset: "IterableDataset[Any]", rank: int, size: int) -> None:
        self.dataset, self._rank, self._size = dataset, rank, size

    def __iter__(self) -> Iterator[Any]:
        rounds = [iter(self.dataset)] * self._size
        for samples in zip(*rounds, strict=False):
            yield samples[self._rank]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # while it is unpickled
            raise AttributeError(name)
        return getattr(self.dataset, name)


BATCHES_PER_MESSAGE = 64
"""Rank 0 tells the others its order in pieces, so that an order may be endless."""


class SharedLoader(DataLoader[Any]):
    """The batches of a loader whose data set has a length, each divided among the ranks."""

    def __init__(
        self, loader: "DataLoader[Any]", rank: int, size: int, tell: "_Teller", name: str
    ) -> None:
        self._order = _Shares(loader.batch_sampler, rank, size, name)
        vars(self).update(vars(loader), _iterator=None, batch_sampler=self._order)
        self._tell = tell

    def __iter__(self) -> Any:
        """Begin an epoch. Collective, and so is every 64th step of it."""
        is_training = torch.is_grad_enabled()
        sizes = self._order.known_sizes()
        for num_samples in sizes if is_training else ():
            self._tell.check(num_samples)  # before the first step, not at the last
        self._order.keeps_empty = is_training
        batches = super().__iter__()
        return self._counted(batches, self._order.counts, is_training=is_training)

    def _counted(
        self, batches: Iterator[Any], counts: "deque[tuple[int, int]]", *, is_training: bool
    ) -> Iterator[Any]:
        for batch in batches:
            mine, total = counts.popleft()
            if is_training:
                self._tell(mine, total)
            yield batch


class _Shares(Sampler[list[Any]]):
    """This rank's part of each batch of a batch sampler, whose order rank 0 draws."""

    def __init__(self, batches: Any, rank: int, size: int, name: str) -> None:
        self._batches, self._rank, self._size, self._name = batches, rank, size, name
        self.counts: deque[tuple[int, int]] = deque()
        """Samples of this rank, and of all, in each batch that was drawn and not yet delivered."""
        self.keeps_empty = True  # whether a rank without samples in a batch gets one all the same

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        self.counts = deque()
        return self._shares(self.counts, keeps_empty=self.keeps_empty)

    def known_sizes(self) -> list[int]:
        """Return the sizes of batches that are known beforehand."""
        batches = self._batches
        if type(batches) is not BatchSampler or not isinstance(batches.sampler, Sized):
            return []
        rest = 0 if batches.drop_last else len(batches.sampler) % batches.batch_size
        return [batches.batch_size, rest]

    def _shares(
        self, counts: "deque[tuple[int, int]]", *, keeps_empty: bool
    ) -> Iterator[list[Any]]:
        for batch in self._agreed():
            share = batch[self._rank :: self._size]
            if share or keeps_empty:
                counts.append((len(share), len(batch)))
                yield share or batch[:1]

    def _agreed(self) -> Iterator[list[Any]]:
        """Yield the batches that rank 0 draws, as every rank hears them."""
        drawn = iter(self._batches) if self._rank == 0 else iter(())
        batches: list[list[Any]] = []
        while True:
            failure: Exception | None = None
            try:
                batches = [list(batch) for batch in islice(drawn, BATCHES_PER_MESSAGE)]
            except Exception as error:  # a program's own: all ranks are told
                failure = error
            told = f"{type(failure).__name__}: {failure}" if failure else ""
            batches, told = broadcast_object((batches, told), name=self._name)
            if told:
                raise DataError(f"the order of an epoch fails on rank 0: {told}") from failure
            yield from batches
            if len(batches) < BATCHES_PER_MESSAGE:
                return


class StreamLoader(DataLoader[Any]):
    """The batches of a loader whose data set is iterated, each divided among the ranks."""

    def __init__(
        self, loader: "DataLoader[Any]", rank: int, size: int, tell: "_Teller", name: str
    ) -> None:
        self._rank, self._size, self._name = rank, size, name
        self._is_compared = False
        collate = _CollateShare(loader.collate_fn, rank, size)
        vars(self).update(vars(loader), _iterator=None, collate_fn=collate)
        self._tell = tell

    def __iter__(self) -> Any:
        """Begin an epoch. Collective, and so is every step of it."""
        return self._shares(super().__iter__(), is_training=torch.is_grad_enabled())

    def _shares(self, batches: Iterator[Any], *, is_training: bool) -> Iterator[Any]:
        for batch, mine, total, identity in self._together(batches):
            if not self._is_compared:
                self._compare(identity)
            if is_training:
                self._tell(mine, total)
            if is_training or mine:
                yield batch

    def _compare(self, identity: str) -> None:
        """Tell once if the ranks have not read the same first batch. Collective."""
        self._is_compared = True
        heard = allgather_object(identity, name=self._name)
        if len(set(heard)) > 1 and self._rank == 0:
            logger.warning(
                "shard() takes every %dth sample of what each rank reads whole, and the first "
                "batches differ, by the checksums %s: let the data set give every rank the same "
                "samples in the same order, without dividing by rank and with the same seed",
                self._size,
                by_rank(heard),
            )

    def _together(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yield until some rank has no batch."""
        while True:
            batch = next(batches, None)
            has_one = torch.tensor([float(batch is not None)])
            if not allreduce(has_one, op=Min, name=self._name).item():
                return
            yield batch


class _CollateShare:
    """Makes a batch of this rank's samples, with their number, that of all, and a checksum."""

    def __init__(self, collate: Callable[[list[Any]], Any], rank: int, size: int) -> None:
        self._collate, self._rank, self._size = collate, rank, size
        self._has_begun = False

    def __call__(self, samples: list[Any]) -> tuple[Any, int, int, str]:
        mine = samples[self._rank :: self._size]
        identity = "" if self._has_begun else identity_of_samples(samples)
        self._has_begun = True
        return self._collate(mine or samples[:1]), len(mine), len(samples), identity


class _Teller:
    """Tells an optimizer what each batch counts, if there is one."""

    def __init__(self, optimizer: Counts | None, batch_size: int | None, size: int) -> None:
        self._optimizer, self._size, self._batch_size = optimizer, size, batch_size
        self._nominal = (batch_size or size) / size

    def __call__(self, mine: int, total: int) -> None:
        self.check(total)
        if self._optimizer is not None:
            self._optimizer.set_num_samples(mine, self._nominal)

    def check(self, num_samples: int) -> None:
        """Refuse a batch of all ranks that would count for too much or too little."""
        if self._optimizer is None and num_samples % self._size:
            raise ConfigError(
                f"without an optimizer to weight gradients all ranks have equally many samples, "
                f"got a batch of {num_samples} for {self._size} ranks; say shard(loader, "
                "optimizer), or take drop_last=True and a batch size that divides; evaluate below "
                "torch.no_grad()"
            )
        passes = getattr(self._optimizer, "backward_passes_per_step", 1)
        if passes > 1 and num_samples not in (0, self._batch_size or num_samples):
            raise ConfigError(
                f"backward_passes_per_step={passes} adds up batches that count alike, got one of "
                f"{num_samples} samples where batch_size is {self._batch_size}; take "
                f"drop_last=True, or leave the argument out and step after {passes} passes"
            )


_MOST_NUMBERS = 1 << 16
"""How many numbers of an array are looked at; another split or order differs in the first ones."""
_MOST_DEPTH = 4
_OF_FLOATS = "about "  # marks a checksum of numbers that processors may round differently


def identity_of(data: object) -> dict[str, str]:
    """Return checksums of the numbers that a data set holds, by attribute. Not collective.

    Indices of a ``Subset``, labels, tables of positions, arrays of samples: a random split or
    order with another seed differs in them. Samples that are read may be augmented at random: they
    are left out.
    """
    return dict(_checksums(data, type(data).__name__, _MOST_DEPTH))


def identity_of_samples(samples: Iterable[object]) -> str:
    """Return a checksum of the texts and integers of some samples, but those of pixels."""
    total = 0
    for sample in samples:
        held = [*sample.values()] if isinstance(sample, Mapping) else sample
        for value in held if isinstance(held, list | tuple) else [held]:
            numbers = _integers(value)
            if numbers is not None and numbers.dtype != np.uint8:
                total = crc32(numbers[:_MOST_NUMBERS].tobytes(), total)
            elif isinstance(value, int | str | np.integer):
                total = crc32(str(value).encode(), total)
    return f"{total:08x}"


def _checksums(value: object, name: str, depth: int) -> Iterator[tuple[str, str]]:
    numbers = _integers(value)
    if numbers is not None:
        yield name, f"{crc32(numbers[:_MOST_NUMBERS].tobytes(), len(numbers)):08x}"
    elif (floats := _floats(value)) is not None:
        yield name, f"{_OF_FLOATS}{crc32(floats.tobytes()):08x}"
    elif depth and _holds_samples(value):
        for key, held in sorted(_parts(value)):
            yield from _checksums(held, f"{name}.{key}", depth - 1)


def _parts(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, DataLoader):
        yield "dataset", value.dataset
    elif isinstance(value, list | tuple):
        yield from ((str(number), held) for number, held in enumerate(value[:8]))
    else:
        yield from vars(value).items()


def _holds_samples(value: object) -> bool:
    """Say whether to look into it: a data set, a loader, or a few of them in a list."""
    if isinstance(value, list | tuple):
        return any(isinstance(held, Tensor | np.ndarray) or _is_data(held) for held in value[:8])
    return _is_data(value)


def _is_data(value: object) -> bool:
    kind = type(value)
    return hasattr(value, "__dict__") and (
        hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")
    )


def _integers(value: object) -> np.ndarray | None:
    """Return a flat array of integers, if that is what it is."""
    if isinstance(value, Tensor):
        dense = value.layout == torch.strided and value.is_cpu
        value = value.detach().numpy() if dense and not value.is_floating_point() else None
    elif isinstance(value, list | range) and value and type(value[0]) in (int, np.int64):
        try:
            value = np.asarray(value[:_MOST_NUMBERS], dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            return None
    if isinstance(value, np.ndarray) and value.dtype.kind in "iub":
        return value.reshape(-1)
    return None


def _floats(value: object) -> np.ndarray | None:
    """Return the first ones of an array of floating point numbers, if that is what it is."""
    if isinstance(value, Tensor) and value.dtype in (torch.float32, torch.float64):
        dense = value.layout == torch.strided and value.is_cpu
        value = value.detach().numpy() if dense else None
    if isinstance(value, np.ndarray) and value.dtype.kind == "f":
        return value.flat[:_MOST_NUMBERS]  # of a view that has gaps not all is copied
    return None
