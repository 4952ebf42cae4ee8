"""A ``DataLoader`` of which each rank takes its share of every batch."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sized
from itertools import count, islice
from typing import Any, Protocol

import torch
from torch.utils.data import BatchSampler, DataLoader, Sampler

from hpctrain.collectives.allreduce import allreduce
from hpctrain.collectives.objects import allgather_object, broadcast_object
from hpctrain.comm.agreement import by_rank
from hpctrain.core.errors import ConfigError, DataError
from hpctrain.core.logs import logger
from hpctrain.data.sample_identity import identity_of_samples
from hpctrain.negotiation.request import Min

BATCHES_PER_MESSAGE = 64
"""Rank 0 tells the others its order in pieces, so that an order may be endless."""


class Counts(Protocol):
    """What takes sample counts: a ``DistributedOptimizer`` or a local method."""

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Say how many samples this rank's loss is the mean of."""


class _Divided(DataLoader[Any]):
    """A loader as it was made, but for what divides its batches."""

    def __init__(
        self, loader: "DataLoader[Any]", optimizer: Counts | None, size: int, **own: Any
    ) -> None:
        vars(self).update(vars(loader), _iterator=None, **own)
        self._tell = _Teller(optimizer, loader.batch_size, size)


class SharedLoader(_Divided):
    """The batches of a loader whose data set has a length, each divided among the ranks."""

    def __init__(
        self,
        loader: "DataLoader[Any]",
        rank: int,
        size: int,
        optimizer: Counts | None,
        *,
        name: str,
    ) -> None:
        self._order = _Shares(loader.batch_sampler, rank, size, name)
        super().__init__(loader, optimizer, size, batch_sampler=self._order)

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
                self._tell.check(total)
                self._tell(mine)
            yield batch


class _Shares(Sampler[list[Any]]):
    """This rank's part of each batch of a batch sampler, whose order rank 0 draws."""

    def __init__(self, batches: Any, rank: int, size: int, name: str) -> None:
        self._batches, self._rank, self._size, self._name = batches, rank, size, name
        self.counts: deque[tuple[int, int]] = deque()
        """Samples of this rank, and of all, in each batch that was drawn and not yet delivered."""
        self.keeps_empty = True
        """Whether a rank without samples in a batch gets one all the same."""

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


class StreamLoader(_Divided):
    """The batches of a loader whose data set is iterated, each divided among the ranks.

    Without a batch size the data set makes the batches, which are dealt in turn.
    """

    def __init__(
        self,
        loader: "DataLoader[Any]",
        rank: int,
        size: int,
        optimizer: Counts | None,
        *,
        name: str,
    ) -> None:
        self._rank, self._size, self._name = rank, size, name
        self._is_compared = False
        collate: Callable[..., Any] = loader.collate_fn
        if loader.batch_size is not None:
            collate = _CollateShare(collate, rank, size)
        super().__init__(loader, optimizer, size, collate_fn=collate)

    def __len__(self) -> int:
        """Return the number of steps, where the data set has a length."""
        batches = super().__len__()
        return batches if self.batch_size is not None else batches // self._size

    def __iter__(self) -> Any:
        """Begin an epoch. Collective, and so is every step of it."""
        is_training = torch.is_grad_enabled()
        batches = super().__iter__()
        if self.batch_size is None:
            rounds = (list(islice(batches, self._size)) for _ in count())
            return (batch[self._rank] for batch in self._together(rounds, self._size))
        return self._shares(batches, is_training=is_training)

    def _shares(self, batches: Iterator[Any], *, is_training: bool) -> Iterator[Any]:
        pieces = (list(islice(batches, 1)) for _ in count())
        for ((batch, mine, total, identity),) in self._together(pieces, 1):
            if not self._is_compared:
                self._compare(identity)
            if is_training:
                self._tell.check(total)
                self._tell(mine)
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

    def _together(self, found: Iterable[list[Any]], wanted: int) -> Iterator[list[Any]]:
        """Yield until some rank has fewer batches than are wanted in a step."""
        for batches in found:
            is_full = torch.tensor([float(len(batches) == wanted)])
            if not allreduce(is_full, op=Min, name=self._name).item():
                return
            yield batches


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

    def __call__(self, num_samples: int) -> None:
        if self._optimizer is not None:
            self._optimizer.set_num_samples(num_samples, self._nominal)

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
