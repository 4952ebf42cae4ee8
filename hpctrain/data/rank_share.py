"""This rank's part of a plain data set or ``DataLoader``: ``hpctrain.shard``."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar

from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from hpctrain.collectives.objects import allgather_object
from hpctrain.comm.agreement import by_rank, raise_if_any
from hpctrain.core.errors import MismatchError
from hpctrain.core.logs import logger
from hpctrain.data.loader import Loader
from hpctrain.data.sample_identity import identity_of
from hpctrain.data.shared_loader import Counts, SharedLoader, StreamLoader
from hpctrain.data.torch_dataloader import Stream
from hpctrain.runtime.world import current

T = TypeVar("T", bound="Dataset[Any] | DataLoader[Any]")

_NUMBERS = count(1)
"""Of loaders, for reports of ranks that wait; all ranks make theirs in the same order."""


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
        return made(data, rank, size, optimizer, name=name)  # type: ignore[return-value]
    if isinstance(data, IterableDataset):
        return _StreamPart(data, rank, size)  # type: ignore[return-value]
    return _part(data, rank, size)  # type: ignore[return-value]


def _compare(identities: Sequence[Mapping[str, str]]) -> None:
    """Refuse data sets that hold other samples, or the same in another order."""
    for name in identities[0]:
        of_ranks = [one.get(name) for one in identities]
        if len(set(of_ranks)) > 1:
            raise MismatchError(
                f"shard() divides the same data set on every rank, got {name} with the checksums "
                f"{by_rank(of_ranks)}; split and shuffle it with the same seed on every rank, as "
                "in random_split(data, sizes, generator=torch.Generator().manual_seed(0)); one "
                "that holds a part for each rank needs no shard()"
            )


def _refusal(data: object, optimizer: object) -> str | None:
    """Say why this cannot be divided, or need not be."""
    kind = type(data).__name__
    if isinstance(data, Loader | Stream | SharedLoader | StreamLoader):
        return f"{kind} is divided among the ranks already; leave shard() out"
    if optimizer is not None and not hasattr(optimizer, "set_num_samples"):
        return (
            f"shard() tells a DistributedOptimizer what a batch counts, got "
            f"{type(optimizer).__name__}; wrap it first"
        )
    if isinstance(data, DataLoader):
        return _refusal_of_loader(data)
    if isinstance(data, IterableDataset) or (_length(data) and hasattr(data, "__getitem__")):
        return None
    return f"shard() takes a torch DataLoader or a data set with samples, got {kind}"


def _refusal_of_loader(loader: "DataLoader[Any]") -> str | None:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", 0))
    if isinstance(loader.dataset, Stream) or any(hasattr(it, "num_replicas") for it in samplers):
        return (
            "this DataLoader is divided among the ranks already, by its sampler or its data set; "
            "leave shard() out, or give the DataLoader a sampler for one process"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        kind = type(loader).__name__
        return f"{kind} iterates in a way of its own; divide its data set: shard(loader.dataset)"
    if loader.batch_sampler is None and not isinstance(loader.dataset, IterableDataset):
        return (
            "a DataLoader with batch_size=None gives batches that only its data set can divide; "
            "give it a batch_size or a batch_sampler, or divide inside the data set"
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
