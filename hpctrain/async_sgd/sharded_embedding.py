"""``ShardedEmbedding``: a table of rows that is divided over all ranks, and steps by itself."""

import math
import secrets
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.sharded_embedding_checks import (
    IS_COUNTED,
    IS_FROZEN,
    check_ids,
    check_table,
    require_alike,
)
from hpctrain.async_sgd.sharded_embedding_ids import (
    Bags,
    first_rows,
    spreading_factor,
)
from hpctrain.async_sgd.sharded_embedding_rows import RowShards, RowSums, Told
from hpctrain.async_sgd.sharded_embedding_rules import (
    Buffers,
    Places,
    bag_sums,
    learning_rate,
    make_rule,
    put,
    take,
)
from hpctrain.async_sgd.sharded_embedding_state import check_state, pieces_of, restore, shards_of
from hpctrain.checkpoint.format.shard import Shard
from hpctrain.comm.agreement import agreed, require_equal
from hpctrain.comm.eager import eager
from hpctrain.comm.threaded import start_on
from hpctrain.core.errors import CheckpointError, ConfigError, NotInitializedError
from hpctrain.core.logs import logger
from hpctrain.gradients.sample_count import check_count
from hpctrain.runtime import world
from hpctrain.runtime.rebuild import Stage

T = TypeVar("T")

_MANY_LOOKUPS = 100  # whose gradients are kept without a step, which is told


class ShardedEmbedding(nn.Module):
    """Rows by number, as ``torch.nn.Embedding``, of which every rank owns a part.

    A lookup copies rows from their owners; backward keeps gradients of the rows that were looked
    up; ``step()`` sums them over the batch and averages them over the ranks, in a fixed order, and
    the owners step the rows that were touched. N ranks take the step of one process with their
    joined batch.

    The table is no parameter of the model: other optimizers, ``DistributedOptimizer`` and
    ``broadcast_parameters`` leave it alone, and no rank has all of it. So ``zero_grad``,
    ``requires_grad_``, ``state_dict`` of a model around it, ``clip_grad_norm_`` and schedulers of
    torch do not reach it: ``hpctrain guide embeddings`` says what to do. Memory is taken for a row
    when it is stepped first; until then it has its first values, which follow from ``seed`` and
    its number alone. To make one, ``forward`` and ``step`` are collective: all ranks call them,
    equally often and in the same order, with any number of ids, also none.

    Source: Naumov et al. 2019, arXiv:1906.00091 (tables divided over ranks beside dense layers).
    """

    steps = 0
    """Steps that the table has taken."""
    _weight, _flags = 1.0, 0  # of a step
    _is_over = False  # whether the world of the table was shut down
    _pending: list[tuple[Places, NDArray[np.int64], Tensor]]  # gradients since the last step

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
        **options: Any,
    ) -> None:
        """Divide the table over all ranks. Collective.

        Args:
            rows: number of rows, 1 to 2147483647.
            dim: numbers in a row.
            optimizer: ``"sgd"``, ``"adagrad"`` with one number of state per row, or ``"adam"``,
                the rule of ``torch.optim.SparseAdam``.
            lr: its learning rate; the attribute ``lr`` may be set between two steps, on all ranks
                alike.
            mode: ``"sum"`` or ``"mean"`` of bags of rows, as ``torch.nn.EmbeddingBag``; None for
                the rows.
            padding_idx: a row that is zero and stays so; bags leave it out.
            init: first values are uniform in ``[-init, init)``.
            seed: of the first values.
            dtype: float32 or float64.
            path: folder on a disk of each node in which the rows lie, in files that go with the
                job; None for memory.
            options: ``eps``, and of adam ``betas``.

        Raises:
            ConfigError: an argument is not valid, or differs between ranks; on every rank.
            NodeMemoryError: there is too little memory or disk, on every rank.
            NotInitializedError: ``hpctrain.init()`` was not called.
        """
        super().__init__()
        comm = world.current().comm
        folder = None if path is None else Path(path)
        with agreed(comm, ConfigError):
            rule = make_rule(optimizer, lr, options)
            check_table(rows, dim, mode, padding_idx, init, seed, dtype, folder)
        first = f"padding_idx={padding_idx}, init={float(init)}, seed={seed}, dtype={dtype}"
        self._what = f"{rows} rows of {dim}, {first}"
        self._repr = f"{rows}, {dim}, optimizer={{}}, mode={mode}, {first}"
        require_equal(comm, [f"ShardedEmbedding({self._repr.format(rule)})"], "a table")
        self.num_rows, self.dim, self.mode, self.padding_idx = rows, dim, mode, padding_idx
        self._rule = rule
        self._factor = spreading_factor(rows)
        self._padding = -1 if padding_idx is None else padding_idx * self._factor % rows
        # Ranks must not take one table for another that was made alike.
        name = f"table {comm.broadcast_object(secrets.token_hex(4))} of {rows} x {dim}"
        new = partial(first_rows, dim=dim, seed=seed, init=init, zero=self._padding, dtype=dtype)
        self._shards = RowShards(comm, name, rows, dim, dtype, rule.widths(dim), new, folder)
        self._results, self._told, self._pending = Buffers(), set[str](), []
        self._optimizer: Callable[[], Optimizer | None] = lambda: None
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

    def requires_grad_(self, requires_grad: bool = True) -> "ShardedEmbedding":  # noqa: FBT001, FBT002 - torch's own
        """Freeze the rows, or let them learn again; on all ranks alike.

        A model around the table does not reach it. Lookups of a frozen one make no gradients, and
        ``step`` leaves it, which all ranks call all the same. Not collective.
        """
        self._flags = self._flags & ~IS_FROZEN | (0 if requires_grad else IS_FROZEN)
        self._pending = self._pending if requires_grad else []
        super().requires_grad_(requires_grad)
        return self

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

    @eager
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
            self._run(lambda: self._shards.read(np.empty(0, np.int64), refusal))
        host = ids.detach().cpu().numpy()
        rows = host.ravel().astype(np.int64) * self._factor % self.num_rows
        bags = Bags(host, offsets, rows != self._padding) if self.mode else None
        rows = rows if bags is None else rows[bags.keep]
        # So that autograd calls backward, unless the table is frozen.
        start = torch.zeros((), requires_grad=not self._flags & IS_FROZEN)
        found: Tensor = _Lookup.apply(start, self, rows, bags)  # type: ignore[no-untyped-call]
        shape = (-1, self.dim) if bags is not None else (*ids.shape, self.dim)
        return found.reshape(shape).to(ids.device)

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
        values, index = self._shards.read(rows)
        if bags is None:
            return self._results.take(values, index)
        if not len(index):
            return torch.zeros(bags.num, self.dim, dtype=values.dtype)
        sums = bag_sums(values, index, bags.offsets)
        return sums if self.mode == "sum" else sums.div_(bags.counts(values.dtype))

    def _push(self, rows: Places, bags: Bags | None, grad: Tensor) -> None:
        """Keep gradients until the step. Not collective."""
        grad = grad.detach().contiguous()
        if len(self._pending) == _MANY_LOOKUPS and self._shards.comm.rank == 0 and not self.steps:
            self._warn(
                f"a table of {self._what} keeps gradients of {_MANY_LOOKUPS} lookups and has "
                f"never stepped; call table.step_with(optimizer), or table.step() in each step"
            )
        if bags is None:
            keep = np.flatnonzero(rows != self._padding)
            self._pending.append((rows[keep], keep, grad))
            return
        grad = grad if self.mode == "sum" else grad / bags.counts(grad.dtype)
        self._pending.append((rows, bags.number, grad))

    # -- the step -----------------------------------------------------------------------------

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Say how many samples this rank's loss is the mean of, from the next step on.

        As ``DistributedOptimizer.set_num_samples``: every rank calls it, or none does. Raises
        ``ConfigError``: the count is not valid, or that of the optimizer with which it steps.
        """
        check_count(num_samples, nominal)
        if getattr(self._optimizer(), "_reducer", None) is not None:
            raise ConfigError(
                "a table that steps with a DistributedOptimizer counts as that does; call its "
                "set_num_samples alone"
            )
        self._weight, self._flags = num_samples / nominal, self._flags | IS_COUNTED

    def zero_grad(self, set_to_none: bool = True) -> None:  # noqa: FBT001, FBT002 - torch's own
        """Forget what backward has kept since the last step. Not collective.

        ``zero_grad`` of a model around the table does not: torch looks at parameters there.
        """
        super().zero_grad(set_to_none)
        self._pending = []

    def step_with(self, optimizer: Optimizer) -> None:
        """Step whenever an optimizer of torch has stepped, and forget gradients with it.

        ``optimizer.zero_grad()`` forgets; ``model.zero_grad()`` does not reach a table. For a
        ``DistributedOptimizer`` ranks count by the samples that it was told of, and ``op=Sum``
        sums here, too. Not collective, but every rank calls it. Raises ``ConfigError``: it is no
        optimizer of torch, or the table steps with another one.
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
        reducer = getattr(self._optimizer(), "_reducer", None)
        if reducer is None:
            return self._weight, True, self._flags
        count = reducer.reduction.count
        is_counted = IS_COUNTED if count.is_set else 0
        return count.weight, count.average, self._flags & ~IS_COUNTED | is_counted

    @torch.no_grad()
    @eager
    def step(self) -> None:
        """Average the gradients that backward has kept, and step their rows. Collective.

        Nothing happens where no rank has looked up a row, and to a table that is frozen.

        Raises:
            MismatchError: another rank does something else, has another ``lr``, counts its samples
                where others do not, or its step has failed; on every rank.
            NotInitializedError: the world of the table was shut down.
        """
        pending, self._pending = self._pending, []
        self._run(lambda: self._step(pending))

    def _step(self, pending: list[tuple[Places, NDArray[np.int64], Tensor]]) -> None:
        weight, averages, flags = self._count()
        shards = self._shards
        sums = _joined(pending, weight if averages else 1.0, self.dim, shards.dtype)
        told = shards.agree("step", None, Told(len(sums), weight, self.lr, flags))
        require_alike(told)
        if not any(each.num_rows for each in told):
            return
        own = shards.sum_own(sums, told)
        scale = 1.0 / (sum(each.weight for each in told) or 1.0) if averages else 1.0
        failure: BaseException | None = None
        try:
            self._update(own, scale)
        except (RuntimeError, MemoryError, ValueError) as error:
            failure = error
        shards.agree(
            "end of step", None if failure is None else f"a step failed: {failure!r:.300}"
        )
        self.steps += 1

    def _update(self, sums: RowSums, scale: float) -> None:
        """Step the rows that this rank owns."""
        shards = self._shards
        for first, stop in sums.chunks():
            rows, grads = sums.rows[first:stop], sums.between(first, stop)
            if not math.isfinite(grads.sum()) and not grads.isfinite().all():
                self._warn(
                    f"a step of a table of {self._what} puts gradients that are no numbers into "
                    f"rows; to leave out such a step, call table.zero_grad(), which "
                    f"model.zero_grad() does not"
                )
            places = rows - shards.start
            values = take(shards.own, places)
            is_new = shards.is_stored[places] == 0
            if is_new.any():
                values[torch.from_numpy(is_new)] = shards.initial(rows[is_new])
            self._rule.step(values, grads.mul_(scale), shards.state, places, self.steps + 1)
            put(shards.own, places, values)
            shards.is_stored[places] = 1

    # -- checkpoints --------------------------------------------------------------------------

    def sharded_state(self) -> dict[str, Any]:
        """Return rows and state of this rank as pieces, for a checkpoint. Not collective.

        Rows stand in the order of ``id * factor % rows``, which is that of no number of ranks.
        """
        return {
            "table": self._what,
            "steps": self.steps,
            "lr": self.lr,
            "tensors": pieces_of(self._shards),
        }

    def wanted(self, path: str) -> dict[str, Shard]:
        """Return what ``load(into=...)`` must read for this rank, of a state at ``path``.

        ``path`` is that of the checkpoint: keys with slashes, ``"model/table"``. Not collective.
        """
        return {f"{path}/tensors/{name}": own for name, own in shards_of(self._shards).items()}

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
            check_state(self._shards, self._what, state)
        require_equal(
            comm,
            [f"steps={state['steps']}, lr={state['lr']}"],
            "the state of a table",
            "load the same checkpoint on every rank",
        )
        restore(self._shards, state["tensors"])
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
        ctx: Any, start: Tensor, table: ShardedEmbedding, rows: Places, bags: Bags | None
    ) -> Tensor:
        """Look up."""
        del start
        ctx.of = table, rows, bags
        return table._run(lambda: table._pull(rows, bags))  # noqa: SLF001

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None]:
        """Keep."""
        table, rows, bags = ctx.of
        table._push(rows, bags, grad)  # noqa: SLF001
        return None, None, None, None


def _joined(
    pending: list[tuple[Places, NDArray[np.int64], Tensor]],
    weight: float,
    dim: int,
    dtype: torch.dtype,
) -> RowSums:
    """Sum gradients of several lookups, times ``weight``."""
    if not pending or weight == 0.0:  # the mean over no samples is NaN
        return RowSums(np.empty(0, np.int64), torch.empty(0, dim, dtype=dtype))
    rows, index, values, base = [], [], [], 0
    for of_rows, of_index, grad in pending:
        rows.append(of_rows)
        index.append(of_index + base)
        values.append(grad)
        base += len(grad)
    grads = values[0] if len(values) == 1 else torch.cat(values)
    grads = grads if weight == 1.0 else grads * weight
    return RowSums(np.concatenate(rows), grads, np.concatenate(index))


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

    world.current().rebuild.register(Stage.HOLDERS, close=close, move=move)
