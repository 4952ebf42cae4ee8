"""``ShardedEmbedding``: a table of rows that is divided over all ranks, and steps by itself."""

import math
import secrets
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from inspect import currentframe
from itertools import accumulate, islice
from pathlib import Path
from traceback import walk_stack
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.sharded_embedding_cache import CacheReport
from hpctrain.async_sgd.sharded_embedding_ids import (
    Bags,
    check_ids,
    check_table,
    first_rows,
    spread,
    spreading_factor,
)
from hpctrain.async_sgd.sharded_embedding_rows import (
    IS_COUNTED,
    IS_FROZEN,
    Buffers,
    Places,
    RowShards,
    RowSums,
    Told,
    bag_sums,
    keys_of,
    put,
    require_alike,
    take,
)
from hpctrain.async_sgd.sharded_embedding_rules import learning_rate, make_rule
from hpctrain.checkpoint.format.shard import Shard
from hpctrain.comm.agreement import agreed, require_equal
from hpctrain.comm.threaded import start_on
from hpctrain.core.errors import CheckpointError, ConfigError, NotInitializedError
from hpctrain.core.logs import logger
from hpctrain.core.paths import absolute
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.gradients.optimizer_exchange import exchange_of
from hpctrain.gradients.sample_count import SampleCount, check_count
from hpctrain.runtime import world
from hpctrain.runtime.rebuild import RebuildStage

T = TypeVar("T")

_MANY_LOOKUPS = 100  # whose gradients are kept without a step, which is told


class ShardedEmbedding(nn.Module):
    """Rows by number, as ``torch.nn.Embedding``, of which every rank owns a part.

    A lookup copies rows from their owners; backward keeps gradients of the rows that were looked
    up; ``step()`` sums them over the batch and averages them over the ranks, in a fixed order, and
    the owners step the rows that were touched. N ranks take the step of one process with their
    joined batch.

    The table is no parameter of the model: other optimizers, ``DistributedOptimizer`` and
    ``broadcast_parameters`` leave it alone, and no rank has all of it. ``zero_grad`` and
    ``requires_grad_`` of a model around it reach it; ``state_dict``, ``clip_grad_norm_`` and
    schedulers of torch do not: ``hpctrain guide embeddings`` says what to do. All ranks freeze it
    or none: ``step``, which all ranks call all the same, leaves it then. Memory is taken for a row
    when it is stepped first; until then it has its first values, which follow from ``seed`` and
    its number alone. To make one, ``forward`` and ``step`` are collective: all ranks call them,
    equally often and in the same order, with any number of ids, also none.

    Source: Naumov et al. 2019, arXiv:1906.00091 (tables divided over ranks beside dense layers).
    """

    steps = 0
    """Steps that the table has taken."""
    _weight, _flags = 1.0, 0  # of a step
    _is_over = False  # whether the world of the table was shut down
    _pending: list[tuple[Places, Tensor]]  # keys of rows, and gradients, since the last step
    _handle: nn.Parameter
    """It is there for the rows: frozen as they are, with a gradient where they have some."""
    _optimizer: Callable[[], Optimizer | None] = staticmethod(lambda: None)

    def __init__(  # noqa: PLR0913 - as torch.nn.Embedding, and how it learns
        self,
        rows: int,
        dim: int,
        *,
        optimizer: str = "adagrad",
        lr: float = 0.01,
        mode: str | None = None,
        padding_idx: int | None = None,
        init: float = 0.05,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        path: Path | str | None = None,
        cache_rows: int = 0,
        cache_steps: int = 0,
        **options: Any,
    ) -> None:
        """Divide the table over all ranks. Collective.

        Args:
            rows: number of rows, 1 to 2147483647.
            dim: numbers in a row.
            optimizer: ``"sgd"``, ``"adagrad"`` with one number of state per row, or ``"adam"``,
                the rule of ``torch.optim.SparseAdam``.
            lr: its learning rate; the attribute may be set between steps, on all ranks alike.
            mode: ``"sum"`` or ``"mean"`` of bags as of ``torch.nn.EmbeddingBag``; None for rows.
            padding_idx: a row that is zero and stays so; bags leave it out.
            init: first values are uniform in ``[-init, init)``.
            seed: of the first values.
            dtype: float32 or float64.
            path: folder on a disk of each node for rows, whose files go with the job; or None.
            cache_rows: rows of other nodes of which each rank keeps copies, for its node.
            cache_steps: how many steps old a copy may be.
            options: ``eps``, and of adam ``betas``.

        Raises:
            ConfigError: an argument is not valid, MismatchError: it differs; on every rank.
            NodeMemoryError: there is too little memory or disk, on every rank.
            NotInitializedError: ``hpctrain.init()`` was not called.
        """
        super().__init__()
        comm, cache = world.current().comm, (cache_rows, cache_steps)
        with agreed(comm, ConfigError):
            disk = None if path is None else absolute(path)
            rule = make_rule(optimizer, lr, options)
            check_table(rows, dim, mode, padding_idx, init, seed, dtype, disk, cache)
        first = f"padding_idx={padding_idx}, init={float(init)}, seed={seed}, dtype={dtype}"
        self._what = f"{rows} rows of {dim}, {first}"
        self._repr = f"{rows}, {dim}, optimizer={{}}, mode={mode}, {first}, cache={cache}"
        require_equal(comm, [f"ShardedEmbedding({self._repr.format(rule)})"], "a table")
        self.num_rows, self.dim, self.mode, self.padding_idx = rows, dim, mode, padding_idx
        self._rule, self._factor = rule, spreading_factor(rows)
        self._padding = -1 if padding_idx is None else padding_idx * self._factor % rows
        # Ranks must not take one table for another that was made alike.
        name = f"table {comm.broadcast_object(secrets.token_hex(4))} of {rows} x {dim}"
        new = partial(first_rows, dim=dim, seed=seed, init=init, zero=self._padding, dtype=dtype)
        self._shards = RowShards(comm, name, rows, dim, dtype, rule.widths(dim), new, disk, cache)
        self._results, self._told, self._pending = Buffers(), set[str](), []
        self._parameters, self._handle = _Hidden(), nn.Parameter(torch.zeros(()))
        _end_with_ranks(self)

    @property
    def lr(self) -> float:
        """The learning rate."""
        return self._rule.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._rule.lr = learning_rate(value)

    def extra_repr(self) -> str:
        """Say what it is."""
        return self._repr.format(self._rule)

    def __getattr__(self, name: str) -> Any:
        """Say where the rows are to who looks for the weight of torch's table."""
        if name == "weight":
            raise AttributeError(
                "a ShardedEmbedding has no weight, since no rank has all rows: look rows up by "
                "table(ids) under torch.no_grad(), or save them by sharded_state()"
            )
        return super().__getattr__(name)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "ShardedEmbedding":  # noqa: FBT001, FBT002 - torch's own
        """Refuse another dtype; on whichever device the model is, rows stay in host memory."""
        dtype = self._shards.dtype
        if (wanted := fn(torch.zeros(0, dtype=dtype)).dtype) != dtype:
            raise ConfigError(
                f"rows of a ShardedEmbedding stay as they were made, {dtype}, got {wanted}; make "
                f"it with dtype=, or convert what it returns: table(ids).to({wanted})"
            )
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    # -- lookups ------------------------------------------------------------------------------

    @dynamo_disable
    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Return rows, or sums or means of bags of rows. Collective.

        Args:
            ids: integers from 0 to ``rows - 1``, of any shape, also empty; with ``mode`` 2-D, a
                bag each line, or 1-D with ``offsets``.
            offsets: where each bag begins in ``ids``, as of ``torch.nn.EmbeddingBag``.

        Returns:
            ``(*ids.shape, dim)``, or ``(bags, dim)``; where ``ids`` are.

        Raises:
            MismatchError: some rank's ids are no rows of the table, or it does something else; on
                every rank.
            NotInitializedError: the world of the table was shut down.
        """
        try:
            check_ids(ids, offsets, self.num_rows, self.mode)
        except ConfigError as error:
            refusal = str(error)  # for the other ranks, too
            self._run(lambda: self._shards.read(np.empty(0, np.int64), 0, refusal))
        host = ids.detach().cpu().numpy()
        rows = spread(host, self._factor, self.num_rows)
        bags = Bags(host, offsets, rows != self._padding) if self.mode else None
        rows = rows if bags is None else rows[bags.keep]
        shape = ids.shape if bags is None else (bags.num,)
        found: Tensor = _Lookup.apply(self._handle, self, rows, bags, (*shape, self.dim))  # type: ignore[no-untyped-call]
        return found.to(ids.device)

    def _run(self, function: Callable[[], T]) -> T:
        """Return what a function of several messages returns, in its turn."""
        self._require_world()
        found: list[T] = []
        start_on(self._shards.comm, lambda: found.append(function())).wait()
        return found[0]

    def _require_world(self) -> None:
        if self._is_over:
            raise NotInitializedError(
                "this table is of a world that was shut down; make it again behind hpctrain.init()"
            )

    def _pull(self, rows: Places, bags: Bags | None) -> Tensor:
        """Look rows up. Collective."""
        values, index = self._shards.read(rows, int(not self.training))
        if bags is None:
            return self._results.take(values, index)
        if not len(index):
            return torch.zeros(bags.num, self.dim, dtype=values.dtype)
        sums = bag_sums(values, index, bags.offsets)
        return sums if self.mode == "sum" else sums.div_(bags.counts(values.dtype))

    def _push(self, rows: Places, bags: Bags | None, grad: Tensor) -> None:
        """Keep gradients until the step. Not collective."""
        grad, pending = grad.detach().contiguous(), self._gradients()
        if len(pending) == _MANY_LOOKUPS and self._shards.comm.rank == 0 and not self.steps:
            self._warn(
                f"a table of {self._what} keeps gradients of {_MANY_LOOKUPS} lookups and has "
                f"never stepped; call table.step_with(optimizer), or table.step() in each step"
            )
        if bags is not None and self.mode == "mean":
            grad = grad / bags.counts(grad.dtype)
        keys = keys_of(rows, np.arange(len(rows)) if bags is None else bags.number)
        if self.padding_idx is not None:
            keys = keys[rows != self._padding]
        self._pending = [*pending, (keys, grad)]
        self._handle.grad = torch.ones(())

    def _gradients(self) -> list[tuple[Places, Tensor]]:
        """Return what backward has kept, unless somebody has cleared gradients since."""
        return self._pending if self._handle.grad is not None and self._handle.grad else []

    def cache_report(self) -> tuple[CacheReport, ...]:
        """Return what copies have saved all ranks so far, then each of them. Collective."""
        shards, call = self._shards, f"report of {self._shards.name}"
        by_rank = self._run(lambda: shards.comm.allgather_object(shards.cache.report, call))
        return CacheReport(*np.sum(by_rank, axis=0).tolist()), *by_rank

    # -- the step -----------------------------------------------------------------------------

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Say how many samples this rank's loss is the mean of, from the next step on.

        As ``DistributedOptimizer.set_num_samples``: every rank calls it, or none does. Raises
        ``ConfigError``: the count is not valid, or that of the optimizer with which it steps.
        """
        check_count(num_samples, nominal)
        if _count_of(self._optimizer()) is not None:
            raise ConfigError(
                "a table that steps with a DistributedOptimizer counts as that does; call its "
                "set_num_samples alone"
            )
        self._weight, self._flags = num_samples / nominal, self._flags | IS_COUNTED

    def step_with(self, optimizer: Optimizer) -> None:
        """Step whenever an optimizer of torch has stepped, and forget gradients with it.

        For a ``DistributedOptimizer`` ranks count by the samples that it was told of, and
        ``op=Sum`` sums here, too. Not collective, but every rank calls it. Raises ``ConfigError``:
        it is no optimizer of torch, or the table steps with another one.
        """
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"a table steps with an optimizer of torch, got {type(optimizer).__name__}; give "
                f"one, or call table.step() in each step"
            )
        if self._optimizer() is not None:
            raise ConfigError(
                "a table steps with one optimizer, and this one does already; call step_with once"
            )
        table, self._optimizer = weakref.ref(self), weakref.ref(optimizer)

        def stepped(*_: object) -> None:
            if (one := table()) is not None:
                one.step()

        forget = optimizer.zero_grad

        def zero_grad(set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
            forget(set_to_none)
            if (one := table()) is not None:
                one.zero_grad()

        optimizer.register_step_post_hook(stepped)
        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    def _count(self) -> tuple[float, bool, int]:
        """Return the weight of this rank's gradients, whether they are averaged, and flags."""
        count = _count_of(self._optimizer())
        flags = self._flags | (0 if self._handle.requires_grad else IS_FROZEN)
        if count is None:
            return self._weight, True, flags
        return count.weight, count.average, flags & ~IS_COUNTED | IS_COUNTED * count.is_set

    @torch.no_grad()
    @dynamo_disable
    def step(self) -> None:
        """Average the gradients that backward has kept, and step their rows. Collective.

        Nothing happens where no rank has looked up a row, and to a table that is frozen. In any
        case, also after an error, what backward has kept so far is gone afterwards.

        Raises:
            MismatchError: another rank does something else, has another ``lr``, counts its samples
                where others do not, or its step has failed; on every rank.
            NotInitializedError: the world of the table was shut down.
        """
        pending, self._pending = self._gradients(), []
        self._run(lambda: self._step(pending))

    def _step(self, pending: list[tuple[Places, Tensor]]) -> None:
        weight, averages, flags = self._count()
        shards = self._shards
        is_none = (averages and weight == 0.0) or flags & IS_FROZEN  # a mean of nothing is NaN
        sums = self._joined([] if is_none else pending)
        told = shards.agree("step", None, Told(len(sums), weight, self.lr, flags))
        require_alike(told)
        if not any(each.num_rows for each in told):
            return
        if averages:
            sums.factor = weight / (sum(each.weight for each in told) or 1.0)
        own, failure = shards.sum_own(sums, told), None
        try:
            self._update(own)
        except (RuntimeError, MemoryError, ValueError) as error:
            failure = f"a step failed: {error!r:.300}"
        shards.agree("end of step", failure)
        self.steps += 1

    def _joined(self, pending: list[tuple[Places, Tensor]]) -> RowSums:
        """Sum gradients of several lookups."""
        nothing = torch.empty(0, self.dim, dtype=self._shards.dtype)
        grads = [grad for _, grad in pending] or [nothing]
        bases = [0, *accumulate(map(len, grads))]
        keys = [keys + base for (keys, _), base in zip(pending, bases, strict=False)]
        joined = np.concatenate(keys or [np.empty(0, np.int64)])
        return RowSums(joined, grads[0] if len(grads) == 1 else torch.cat(grads))

    def _update(self, sums: RowSums) -> None:
        """Step the rows that this rank owns."""
        shards = self._shards
        for part in sums.chunks():
            rows, grads = sums.rows[part], sums.of(part)
            if not math.isfinite(grads.sum()) and not grads.isfinite().all():
                self._warn(
                    f"a step of a table of {self._what} puts gradients that are no numbers into "
                    f"rows; to leave out such a step, call zero_grad() of the model behind it"
                )
            places = rows - shards.start
            kept = {name: take(values, places) for name, values in shards.own.items()}
            is_new = shards.is_stored[places] == 0
            if is_new.any():
                kept["rows"][torch.from_numpy(is_new)] = shards.initial(rows[is_new])
            self._rule.step(kept["rows"], grads, kept, self.steps + 1)
            for name, values in kept.items():
                put(shards.own[name], places, values)
            shards.is_stored[places] = 1

    # -- checkpoints --------------------------------------------------------------------------

    def sharded_state(self) -> dict[str, Any]:
        """Return rows and state of this rank as pieces, for a checkpoint. Not collective.

        Rows stand in the order of ``id * factor % rows``, which is that of no number of ranks.
        """
        pieces = self._shards.pieces()
        return {"table": self._what, "steps": self.steps, "lr": self.lr, "tensors": pieces}

    def wanted(self, path: str) -> dict[str, Shard]:
        """Return what ``load(into=...)`` must read for this rank, of a state at ``path``.

        ``path`` is that of the checkpoint: keys with slashes, ``"model/table"``. Not collective.
        """
        pieces = self._shards.pieces()
        return {f"{path}/tensors/{name}": own.shard for name, own in pieces.items()}

    def load_sharded_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``sharded_state`` has returned, on any number of ranks. Collective.

        What it does not hold, rows that were never stepped, is as in a new table.

        Raises:
            CheckpointError: it is of another table, or no such state; on every rank.
            MismatchError: ranks give states of different steps; on every rank.
        """
        self._require_world()
        comm = self._shards.comm
        with agreed(comm, CheckpointError):
            self._shards.check(self._what, state)
        own = f"steps={state['steps']}, lr={state['lr']}"
        require_equal(comm, [own], "a table's state", "load the same checkpoint on every rank")
        self._shards.restore(state["tensors"])
        self.steps, self.lr, self._pending = state["steps"], state["lr"], []
        comm.barrier()

    def _warn(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            logger.warning(text)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Refuse to be copied: rows are memory of several ranks."""
        raise ConfigError(
            "a sharded embedding cannot be copied or pickled; keep its sharded_state() in a "
            "checkpoint of hpctrain"
        )


class _Lookup(torch.autograd.Function):
    """Rows that backward keeps gradients for."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Tensor,
        table: ShardedEmbedding,
        rows: Places,
        bags: Bags | None,
        shape: tuple[int, ...],
    ) -> Tensor:
        """Look up."""
        del start
        ctx.of = table, rows, bags
        found = table._run(lambda: table._pull(rows, bags)).view(shape)  # noqa: SLF001
        # The same memory, and not a view, which autograd lets nobody change in place.
        return torch.empty(0, dtype=found.dtype).set_(
            found.untyped_storage(), found.storage_offset(), shape, found.stride()
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        """Keep."""
        table, rows, bags = ctx.of
        table._push(rows, bags, grad.reshape(-1, table.dim))  # noqa: SLF001
        return (None,) * 5


class _Hidden(dict[str, nn.Parameter | None]):
    """Parameters that only ``zero_grad`` and ``requires_grad_`` of modules find.

    Torch finds what these work on as it finds what an optimizer gets, so it depends on who asks.
    """

    _SEEN_BY = (nn.Module.zero_grad.__code__, nn.Module.requires_grad_.__code__)
    _MOST_CALLS = 10  # between these and here

    def items(self) -> Any:
        """Return what there is for the one who asks."""
        frames = islice(walk_stack(currentframe()), self._MOST_CALLS)
        is_seen = any(frame.f_code in self._SEEN_BY for frame, _ in frames)
        return super().items() if is_seen else {}.items()


def _count_of(optimizer: Optimizer | None) -> SampleCount | None:
    exchange = exchange_of(optimizer)
    return None if exchange is None else exchange.count


def _end_with_ranks(table: ShardedEmbedding) -> None:
    """Let a world without lost ranks hear that rows were lost with them."""
    kept = weakref.ref(table)

    def move() -> None:
        if kept() is not None:
            raise ConfigError(
                "a sharded embedding has lost rows with the ranks that are lost; start again from "
                "the checkpoint"
            )

    def close() -> None:
        if (one := kept()) is not None:
            one._is_over = True  # noqa: SLF001

    world.current().rebuild.register(RebuildStage.HOLDERS, close=close, move=move)
