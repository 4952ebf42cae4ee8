"""Divide a torch ``DataLoader`` or data set among the ranks: ``hpctrain.shard_data``."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from itertools import accumulate, chain, count, islice
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
"""Counter of the loaders that ``shard_data`` returned, identical on all ranks. The name of a
loader's collective operations contains the count, so that the names of two loaders differ."""


class Counts(Protocol):
    """Protocol of optimizers that weight gradients by sample counts."""

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Set the number of samples in this rank's mean loss; ``nominal`` is the usual number."""


def shard_data(data: T, optimizer: Counts | None = None) -> T:
    """Return this rank's part of a ``DataLoader`` or of a data set. Collective.

    If ``data`` is a loader, each of its batches is a global batch: rank 0 draws the order of an
    epoch, and each rank reads every ``size()``-th sample of a batch. Workers, ``collate_fn`` and
    ``len()`` do not change. All ranks begin their epochs together.

    If ``data`` is a data set, each rank gets every ``size()``-th sample. If the samples do not
    divide evenly, the first samples are repeated, as in torch's ``DistributedSampler``. An
    ``IterableDataset`` is divided into groups of ``size()`` samples; an incomplete last group is
    omitted.

    If ``data`` is an ``IterableDataset`` or a loader of one, every rank reads all samples and
    keeps its part. The data set must yield the same samples in the same order on all ranks. An
    epoch of such a loader ends on all ranks as soon as one rank has no further batch.

    Args:
        data: the loader or data set that one process would use.
        optimizer: its ``set_num_samples`` is called for each batch, so that the average of
            gradients is exact if ranks have different numbers of samples. A rank without samples
            gets one sample of another rank, whose gradients have weight 0. Without an optimizer,
            different numbers of samples are an error. Inside ``torch.no_grad()``, a rank without
            samples gets no batch.

    Raises:
        MismatchError: on every rank, if ``data`` is already divided, cannot be divided, or differs
            between ranks, for example after a random split with different seeds.
        ConfigError: the last batch is shorter, but several backward passes are accumulated per
            step.

    Differs from a run of one process: each rank draws its own random numbers for transforms.
    """
    topology = current().topology
    refusal = _refusal(data, optimizer)
    facts = f"{type(data).__name__} {_length(data)} {getattr(data, 'batch_size', None)}"
    facts = f"{facts}, {'with' if optimizer else 'without'} an optimizer"
    identity = dict(_checksums(data, type(data).__name__))
    gathered = allgather_object((refusal, facts, identity), name="shard")
    refusals, all_facts, identities = zip(*gathered, strict=True)
    raise_if_any(refusals)
    if len(set(all_facts)) > 1:
        raise MismatchError(
            f"shard_data() must get the same data on every rank, got {by_rank(all_facts)}; "
            "let every rank open the same data"
        )
    _compare(identities)
    rank, size = topology.rank, topology.size
    if size == 1:
        return data
    if isinstance(data, DataLoader):
        made = StreamLoader if isinstance(data.dataset, IterableDataset) else SharedLoader
        name = f"the loader of shard_data() call {next(_NUMBERS)}"
        weigh = _Weights(optimizer, data.batch_size, size)
        return made(data, rank, size, weigh, name)  # type: ignore[return-value]
    if isinstance(data, IterableDataset):
        return _StreamPart(data, rank, size)  # type: ignore[return-value]
    return _part(data, rank, size)  # type: ignore[return-value]


def _compare(identities: Sequence[Mapping[str, str]]) -> None:
    """Raise if the data sets of the ranks have different samples or orders.

    Warn if only floating point values differ, because processors may round differently.
    """
    for name in identities[0]:
        of_ranks = [one.get(name, "") for one in identities]
        if len(set(of_ranks)) == 1:
            continue
        text = (
            f"shard_data() must get the same data set on every rank, got {name} with the "
            f"checksums {by_rank(of_ranks)}; split and shuffle it with the same seed on every "
            f"rank, as in random_split(data, sizes, "
            f"generator=torch.Generator().manual_seed(0)); omit shard_data() if each rank has "
            f"its own part"
        )
        if not of_ranks[0].startswith(_OF_FLOATS):
            raise MismatchError(text)
        if current().topology.rank == 0:
            # Different processors may round the same samples differently.
            logger.warning("%s; the run continues, as only floating point values differ", text)


def _refusal(data: object, optimizer: object) -> str | None:
    """Return the error message if ``data`` cannot be divided or is already divided, else None."""
    kind = type(data).__name__
    if isinstance(data, Loader | DividedLoader):
        return (
            f"shard_data() must get data that are not divided yet, but {kind} is already divided "
            f"among the ranks; omit shard_data()"
        )
    if optimizer is not None and not hasattr(optimizer, "set_num_samples"):
        return (
            f"the optimizer of shard_data() must be a DistributedOptimizer, or a training method "
            f"such as hvd.LocalSGD(), got {type(optimizer).__name__}; wrap it first, or use "
            f"shard_data(loader, method) inside `with hvd.LocalSGD(model, optimizer) as method`"
        )
    if isinstance(data, DataLoader):
        return _refusal_of_loader(data)
    if isinstance(data, IterableDataset) or (_length(data) and hasattr(data, "__getitem__")):
        return None
    return f"shard_data() must get a torch DataLoader or a data set with samples, got {kind}"


def _refusal_of_loader(loader: "DataLoader[Any]") -> str | None:
    samplers = (loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", 0))
    if any(hasattr(it, "num_replicas") for it in samplers):
        return (
            "shard_data() must get data that are not divided yet, but the DataLoader is already "
            "divided among the ranks by its sampler; omit shard_data(), or give the DataLoader a "
            "sampler for one process"
        )
    if type(loader).__iter__ is not DataLoader.__iter__:
        kind = type(loader).__name__
        return (
            f"the DataLoader of shard_data() must not override __iter__, but {kind} does; divide "
            f"its data set: shard_data(loader.dataset)"
        )
    if loader.batch_size is None and loader.batch_sampler is None:
        return (
            "the DataLoader of shard_data() must have a batch_size, but it is None; set a "
            "batch_size, or, if the data set yields whole batches, give each rank every size()-th "
            "batch: DataLoader(shard_data(dataset), batch_size=None)"
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
        logger.info(
            "%d samples do not divide evenly among %d ranks: %d samples are used twice",
            total,
            size,
            steps * size - total,
        )
    return Subset(dataset, [(rank + step * size) % total for step in range(steps)])


class _StreamPart(IterableDataset[Any]):
    """Every ``size``-th sample of an iterable data set.

    If fewer than ``size`` samples remain at the end, they are omitted.
    """

    def __init__(self, dataset: "IterableDataset[Any]", rank: int, size: int) -> None:
        self.dataset, self._rank, self._size = dataset, rank, size

    def __iter__(self) -> Iterator[Any]:
        rounds = [iter(self.dataset)] * self._size
        for samples in zip(*rounds, strict=False):
            yield samples[self._rank]

    def __getattr__(self, name: str) -> Any:
        if name == "dataset":  # not set yet during unpickling
            raise AttributeError(name)
        return getattr(self.dataset, name)


BATCHES_PER_MESSAGE, INDICES_PER_MESSAGE = 64, 1 << 20
"""Limits of a message. Rank 0 broadcasts the order of an epoch in several messages, because the
order may be endless. A message ends with the batch that reaches one of the limits."""


class DividedLoader(DataLoader[Any]):
    """Base class of copies of a ``DataLoader`` that divide each batch among the ranks.

    The constructor copies the attributes of a loader, except those given in ``replaced``.
    """

    def __init__(self, loader: "DataLoader[Any]", weigh: "_Weights", **replaced: Any) -> None:
        vars(self).update(vars(loader), _iterator=None, **replaced)
        self._weigh = weigh


class SharedLoader(DividedLoader):
    """Loader of a data set with random access; each rank reads only its own samples."""

    def __init__(
        self, loader: "DataLoader[Any]", rank: int, size: int, weigh: "_Weights", name: str
    ) -> None:
        self._order = _OwnIndices(loader.batch_sampler, rank, size, name)
        super().__init__(loader, weigh, batch_sampler=self._order)

    def __iter__(self) -> Any:
        """Start an epoch. Collective; at least one of every 64 steps is collective too."""
        is_training = torch.is_grad_enabled()
        for num_samples in self._order.known_sizes() if is_training else ():
            self._weigh.check(num_samples)  # before the first step, not at the last batch
        self._order.keeps_empty = is_training
        batches = super().__iter__()
        return self._counted(batches, self._order.counts, is_training=is_training)

    def _counted(
        self, batches: Iterator[Any], counts: "deque[tuple[int, int]]", *, is_training: bool
    ) -> Iterator[Any]:
        for batch in batches:
            mine, total = counts.popleft()
            if is_training:
                self._weigh(mine, total)
            yield batch


class _OwnIndices(Sampler[list[Any]]):
    """Batch sampler that yields, for each batch that rank 0 draws, the indices of this rank."""

    def __init__(self, batches: Any, rank: int, size: int, name: str) -> None:
        self._batches, self._rank, self._size, self._name = batches, rank, size, name
        self.counts: deque[tuple[int, int]] = deque()
        """For each batch not yet delivered: number of samples of this rank, and of all ranks."""
        self.keeps_empty = True  # whether a rank without samples reads a sample of another rank

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[Any]]:
        self.counts = deque()
        return self._shares(self.counts, keeps_empty=self.keeps_empty)

    def known_sizes(self) -> list[int]:
        """Return the full batch size and the size of a last, smaller batch, or 0 without one.

        Returns an empty list if the sizes are not known.
        """
        batches = self._batches
        if type(batches) is not BatchSampler or not isinstance(batches.sampler, Sized):
            return []
        rest = 0 if batches.drop_last else len(batches.sampler) % batches.batch_size
        return [batches.batch_size, rest]

    def _shares(
        self, counts: "deque[tuple[int, int]]", *, keeps_empty: bool
    ) -> Iterator[list[Any]]:
        drawn = iter(self._batches) if self._rank == 0 else iter(())
        is_last = False
        while not is_last:
            sizes, indices = self._agreed(drawn)
            is_last = len(sizes) < BATCHES_PER_MESSAGE and sum(sizes) < INDICES_PER_MESSAGE
            batches = (
                indices[end - size : end]
                for size, end in zip(sizes, accumulate(sizes), strict=True)
            )
            own = [
                (_listed(each[self._rank :: self._size]), _listed(each[:1])) for each in batches
            ]
            del indices, batches  # keep only the indices of this rank while batches are read
            for total, (share, first) in zip(sizes, own, strict=True):
                if share or keeps_empty:
                    counts.append((len(share), total))
                    yield share or first

    def _agreed(self, drawn: Iterator[Any]) -> tuple[list[int], Any]:
        """Broadcast the next batches from rank 0; return their sizes and joined indices.

        Collective. Only rank 0 uses ``drawn``.
        """
        batches: list[list[Any]] = []
        failure: Exception | None = None
        try:
            for batch in islice(drawn, BATCHES_PER_MESSAGE):
                batches.append(list(batch))
                if sum(map(len, batches)) >= INDICES_PER_MESSAGE:
                    break
        except Exception as error:  # an error of the user's sampler must be raised on every rank
            failure = error
        indices: Any = list(chain.from_iterable(batches))
        if all(type(index) is int for index in indices):
            with suppress(OverflowError):
                indices = np.array(indices, np.int64)  # a fifth of a list's memory
        reason = f"{type(failure).__name__}: {failure}" if failure else ""
        drawn_by_root = [*map(len, batches)], indices, reason
        sizes, indices, reason = broadcast_object(drawn_by_root, name=self._name)
        if reason:
            raise DataError(f"rank 0 cannot draw the order of an epoch: {reason}") from failure
        return sizes, indices


def _listed(indices: Any) -> list[Any]:
    listed: list[Any] = indices.tolist() if isinstance(indices, np.ndarray) else indices
    return listed


class StreamLoader(DividedLoader):
    """Loader of an ``IterableDataset``; each rank reads all samples and keeps its own."""

    def __init__(
        self, loader: "DataLoader[Any]", rank: int, size: int, weigh: "_Weights", name: str
    ) -> None:
        self._rank, self._size, self._name = rank, size, name
        self._is_compared = False
        collate = _CollateShare(loader.collate_fn, rank, size)
        super().__init__(loader, weigh, collate_fn=collate)

    def __iter__(self) -> Any:
        """Start an epoch. Collective; every step is collective too."""
        return self._shares(super().__iter__(), is_training=torch.is_grad_enabled())

    def _shares(self, batches: Iterator[Any], *, is_training: bool) -> Iterator[Any]:
        while True:  # the epoch ends on all ranks when one rank has no batch
            found: Any = next(batches, None)
            has_one = torch.tensor([float(found is not None)])
            if not allreduce(has_one, op=Min, name=self._name).item():
                return
            batch, mine, total, identity = found
            if not self._is_compared:
                self._compare(identity)
            if is_training:
                self._weigh(mine, total)
            if is_training or mine:
                yield batch

    def _compare(self, identity: str) -> None:
        """Warn once if the ranks read different first batches. Collective."""
        self._is_compared = True
        identities = allgather_object(identity, name=self._name)
        if len(set(identities)) > 1 and self._rank == 0:
            logger.warning(
                "an iterable data set in shard_data() must yield the same samples in the same "
                "order on every rank, but the first batches differ, with the checksums %s; use "
                "the same seed on every rank, and do not divide the samples by rank",
                by_rank(identities),
            )


class _CollateShare:
    """Collate function of this rank's part of a batch.

    A call returns the collated part, the numbers of samples in the part and in the batch, and a
    checksum of the batch. From the second call on, the checksum is an empty string.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], rank: int, size: int) -> None:
        self._collate, self._rank, self._size = collate, rank, size
        self._has_begun = False

    def __call__(self, samples: list[Any]) -> tuple[Any, int, int, str]:
        mine = samples[self._rank :: self._size]
        identity = "" if self._has_begun else identity_of_samples(samples)
        self._has_begun = True
        return self._collate(mine or samples[:1]), len(mine), len(samples), identity


class _Weights:
    """Function that passes the sample count of each batch to the optimizer, if any."""

    def __init__(self, optimizer: Counts | None, batch_size: int | None, size: int) -> None:
        self._optimizer, self._size, self._batch_size = optimizer, size, batch_size
        self._nominal = (batch_size or size) / size

    def __call__(self, mine: int, total: int) -> None:
        self.check(total)
        if self._optimizer is not None:
            self._optimizer.set_num_samples(mine, self._nominal)

    def check(self, num_samples: int) -> None:
        """Raise ``ConfigError`` if gradients of ``num_samples`` would get a wrong weight."""
        if self._optimizer is None and num_samples % self._size:
            raise ConfigError(
                f"without an optimizer in shard_data() all ranks must have the same number of "
                f"samples, got a batch of {num_samples} for {self._size} ranks; use "
                f"shard_data(loader, optimizer), which weights gradients, or drop_last=True and "
                f"a batch size that is a multiple of the number of ranks; to evaluate, iterate "
                f"inside torch.no_grad()"
            )
        passes = getattr(self._optimizer, "backward_passes_per_step", 1)
        if passes > 1 and num_samples not in (0, self._batch_size or num_samples):
            raise ConfigError(
                f"all batches must have the same size with backward_passes_per_step={passes}, got "
                f"a batch of {num_samples} samples with batch_size {self._batch_size}; use "
                f"drop_last=True, or omit backward_passes_per_step and call step() after "
                f"{passes} passes"
            )


_MAX_NUMBERS = 1 << 16
"""Number of elements of an array in its checksum. The first elements suffice, because they differ
if the ranks have different splits or orders."""
_MAX_DEPTH = 4
_OF_FLOATS = "about "  # marks a checksum of numbers that processors may round differently


def identity_of_samples(samples: Iterable[object]) -> str:
    """Return a checksum of the strings and integers in samples, to compare ranks.

    Floating point values and uint8 are left out, because random augmentation changes pixels.
    """
    total = 0
    for sample in samples:
        held = [*sample.values()] if isinstance(sample, Mapping) else sample
        for value in held if isinstance(held, list | tuple) else [held]:
            numbers = _numbers(value)
            if numbers is not None and numbers.dtype.kind != "f" and numbers.dtype != np.uint8:
                total = crc32(numbers.flat[:_MAX_NUMBERS].tobytes(), total)
            elif isinstance(value, int | str | np.integer):
                total = crc32(str(value).encode(), total)
    return f"{total:08x}"


def _checksums(value: object, name: str, depth: int = _MAX_DEPTH) -> Iterator[tuple[str, str]]:
    """Yield name and checksum of each attribute of a data set that contains numbers. Local.

    Splits or orders that were drawn with different seeds differ in the indices of a ``Subset``, in
    labels or in arrays of samples. No sample is read, because samples may be augmented randomly.
    """
    numbers = _numbers(value)
    if numbers is not None:
        first = numbers.flat[:_MAX_NUMBERS].tobytes()  # copies only these elements
        is_float = numbers.dtype.kind == "f"
        crc = crc32(first) if is_float else crc32(first, numbers.size)
        yield name, f"{_OF_FLOATS if is_float else ''}{crc:08x}"
    elif depth and _holds_samples(value):
        for key, held in sorted(_attributes(value)):
            yield from _checksums(held, f"{name}.{key}", depth - 1)


def _attributes(value: object) -> Iterator[tuple[str, Any]]:
    if isinstance(value, DataLoader):
        yield "dataset", value.dataset
    elif isinstance(value, list | tuple):
        yield from ((str(number), held) for number, held in enumerate(value[:8]))
    else:
        yield from vars(value).items()


def _holds_samples(value: object) -> bool:
    """Return whether a value is a data set, a loader, or a list that contains these or arrays."""
    if isinstance(value, list | tuple):
        return any(isinstance(held, Tensor | np.ndarray) or _is_data(held) for held in value[:8])
    return _is_data(value)


def _is_data(value: object) -> bool:
    kind = type(value)
    return hasattr(value, "__dict__") and (
        hasattr(kind, "__getitem__") or hasattr(kind, "__iter__")
    )


def _numbers(value: object) -> np.ndarray | None:
    """Convert an array, tensor or list of integers to an array; None for all other values."""
    if isinstance(value, Tensor):
        is_known = value.dtype in (torch.float32, torch.float64) or not value.is_floating_point()
        is_readable = is_known and value.layout == torch.strided and value.is_cpu
        value = value.detach().numpy() if is_readable else None
    elif isinstance(value, list | range) and value and type(value[0]) in (int, np.int64):
        with suppress(TypeError, ValueError, OverflowError):
            value = np.asarray(value[:_MAX_NUMBERS], dtype=np.int64)
    return value if isinstance(value, np.ndarray) and value.dtype.kind in "iubf" else None
