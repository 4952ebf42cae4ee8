"""``ShardedEmbedding``: an embedding table that is divided among all ranks, with its optimizer."""

import math
import secrets
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from inspect import currentframe
from itertools import accumulate, islice
from pathlib import Path
from traceback import walk_stack
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hpctrain.async_sgd.sharded_embedding_cache import CacheReport, RowCache
from hpctrain.async_sgd.sharded_embedding_exchange import (
    IS_COUNTED,
    IS_FROZEN,
    RowExchange,
    RowReport,
    require_same_step,
)
from hpctrain.async_sgd.sharded_embedding_ids import (
    Bags,
    FirstRows,
    IdSpread,
    check_ids,
    check_shape,
    check_storage,
)
from hpctrain.async_sgd.sharded_embedding_memory import NodeRows, require_memory
from hpctrain.async_sgd.sharded_embedding_rows import (
    Buffers,
    Places,
    RowOwners,
    RowSums,
    bag_sums,
    keys_of,
)
from hpctrain.async_sgd.sharded_embedding_rules import learning_rate, make_rule
from hpctrain.checkpoint.format.shard import Shard
from hpctrain.comm.agreement import agreed, require_equal
from hpctrain.comm.communicator import Communicator
from hpctrain.core.errors import CheckpointError, ConfigError
from hpctrain.core.logs import logger
from hpctrain.core.paths import absolute
from hpctrain.core.torch_compat import dynamo_disable
from hpctrain.gradients.optimizer_exchange import exchange_of
from hpctrain.gradients.sample_count import SampleCount
from hpctrain.runtime import world

_MANY_LOOKUPS = 100  # lookups without a step before a warning


class ShardedEmbedding(nn.Module):
    """Embedding table like ``torch.nn.Embedding``, with rows divided among all ranks.

    A lookup copies rows from the ranks that own them, and backward stores the gradients of these
    rows. ``step()`` sums the gradients over the batch and averages them over the ranks, in a fixed
    order; then the owners update the rows. A step of N ranks equals a step of one process on the
    joined batch of all ranks.

    The table is not a parameter of the model: other optimizers, ``DistributedOptimizer`` and
    ``broadcast_parameters`` ignore it, and no rank stores the whole table. ``zero_grad`` and
    ``requires_grad_`` of a model include its tables; ``state_dict``, ``clip_grad_norm_`` and
    schedulers of torch do not, see ``hpctrain guide embeddings``. All ranks freeze a table or
    none does; ``step`` of a frozen table is a no-op, but still collective. A row uses memory only
    after its first step; until then its values are computed from ``seed`` and the row number.

    The constructor, ``forward`` and ``step`` are collective: all ranks call them, equally often
    and in the same order, with any number of ids, including none.

    Args:
        rows: number of rows, 1 to 2147483647.
        dim: elements of a row.
        optimizer: ``"sgd"``, ``"adagrad"`` with one state element per row, or ``"adam"``, the
            rule of ``torch.optim.SparseAdam``.
        lr: learning rate; the attribute ``lr`` may be set between steps, on all ranks.
        mode: ``"sum"`` or ``"mean"`` to return one vector per bag of ids, like
            ``torch.nn.EmbeddingBag``; None to return rows.
        padding_idx: id of a row that remains zero and is omitted from bags; None for no padding.
        init: initial values are uniform in ``[-init, init)``.
        seed: seed of the initial values.
        dtype: float32 or float64.
        path: folder on a disk of each node, for the rows of the node; the files are removed at the
            end of the job. None to store rows in memory.
        cache_rows: number of rows of other nodes that each rank caches for its node.
        cache_steps: number of steps after which a cached row expires.
        options: ``eps``; with ``"adam"`` also ``betas``.

    Raises:
        ConfigError: an argument is not valid; on every rank.
        MismatchError: an argument differs between ranks; on every rank.
        NodeMemoryError: memory or disk space is not sufficient; on every rank.
        NotInitializedError: ``hpctrain.init()`` was not called.

    Source: Naumov et al. 2019, arXiv:1906.00091 (divided tables and dense layers).
    """

    steps = 0
    """Steps that the table has taken."""
    _pending: list[tuple[Places, Tensor]]  # keys and gradients of lookups since the last step
    _handle: nn.Parameter
    """Represents the rows in autograd: frozen with the rows, with a gradient if rows have one."""
    _optimizer: Callable[[], Optimizer | None] = staticmethod(lambda: None)

    def __init__(  # noqa: PLR0913 - keyword options of users
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
        super().__init__()
        comm, cache = world.current().comm, (cache_rows, cache_steps)
        with agreed(comm, ConfigError):
            disk = None if path is None else absolute(path)
            rule = make_rule(optimizer, lr, options)
            check_shape(rows, dim, mode, padding_idx)
            spread = IdSpread(rows, padding_idx)
            first = FirstRows(dim=dim, init=init, seed=seed, dtype=dtype, zero=spread.padding)
            check_storage(disk, cache)
        what = f"padding_idx={padding_idx}, {first}"
        self._what = f"{rows} rows of {dim}, {what}"
        self._repr = f"{rows}, {dim}, optimizer={{}}, mode={mode}, {what}, cache={cache}"
        require_equal(comm, [f"ShardedEmbedding({self._repr.format(rule)})"], "a table")
        self.dim, self.mode, self._rule, self._spread = dim, mode, rule, spread
        self._divide(comm, first, disk, cache)
        self._results, self._pending, self._samples = Buffers(), [], SampleCount()
        self._warned = set[str]()
        self._parameters, self._handle = _Hidden(), nn.Parameter(torch.zeros(()))

    def _divide(
        self, comm: Communicator, first: FirstRows, disk: Path | None, cache: tuple[int, int]
    ) -> None:
        """Allocate the rows of this rank, and set up the exchange with other ranks. Collective."""
        # The token distinguishes tables that have the same arguments.
        token = comm.broadcast_object(secrets.token_hex(4))
        name = f"table {token} of {self.num_rows} x {self.dim}"
        nodes = sorted(set(comm.allgather_object(tuple(comm.node_ranks))))
        owners, widths = RowOwners(self.num_rows, nodes, comm.rank), self._rule.widths(self.dim)
        row_bytes = (self.dim + sum(widths.values())) * first.dtype.itemsize + 1
        require_memory(comm, name, owners, row_bytes, cache[0], disk)
        self._memory = NodeRows(comm, owners, first, widths, disk)
        copies = RowCache(*cache, self.dim, first.dtype)
        self._exchange = RowExchange(comm, name, owners, self._memory, copies)

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return self._spread.num_rows

    @property
    def padding_idx(self) -> int | None:
        """Id of the row that remains zero; None without padding."""
        return self._spread.padding_idx

    @property
    def lr(self) -> float:
        """Learning rate of the table."""
        return self._rule.lr

    @lr.setter
    def lr(self, value: float) -> None:
        self._rule.lr = learning_rate(value)

    def extra_repr(self) -> str:
        """Return the arguments of the table, for ``repr``."""
        return self._repr.format(self._rule)

    def __getattr__(self, name: str) -> Any:
        """Raise ``AttributeError`` for ``weight``, an attribute of ``torch.nn.Embedding``."""
        if name == "weight":
            raise AttributeError(
                "weight of a ShardedEmbedding cannot be read, since no rank stores all rows; look "
                "rows up by table(ids) under torch.no_grad(), or save them by sharded_state()"
            )
        return super().__getattr__(name)

    def _apply(
        self, fn: Callable[[Tensor], Tensor], *args: Any, **options: Any
    ) -> "ShardedEmbedding":
        """Raise ``ConfigError`` if ``fn`` changes the dtype; rows stay in host memory."""
        dtype = self._memory.first.dtype
        if (wanted := fn(torch.zeros(0, dtype=dtype)).dtype) != dtype:
            raise ConfigError(
                f"rows of a ShardedEmbedding must keep their dtype, {dtype}, got {wanted}; "
                f"make the table with dtype=, or convert the result of lookups: "
                f"table(ids).to({wanted})"
            )
        super()._apply(fn, *args, **options)  # type: ignore[no-untyped-call]
        return self

    # -- lookups ------------------------------------------------------------------------------

    @dynamo_disable
    def forward(self, ids: Tensor, offsets: Tensor | None = None) -> Tensor:
        """Return the rows of ``ids``, or sums or means of bags of rows. Collective.

        Args:
            ids: integers from 0 to ``rows - 1``, of any shape, including empty. With ``mode``:
                ``(bags, ids per bag)``, or 1-D with ``offsets``.
            offsets: first position of each bag in ``ids``, as for ``torch.nn.EmbeddingBag``.

        Returns:
            ``(*ids.shape, dim)``, or ``(bags, dim)`` with ``mode``; on the device of ``ids``.

        Raises:
            MismatchError: ids of a rank are out of range, or ranks make different calls; on
                every rank.
            NotInitializedError: the world of the table was shut down.
        """
        try:
            check_ids(ids, offsets, self.num_rows, self.mode)
        except ConfigError as error:
            refusal = str(error)  # all ranks raise an error with this text
            self._exchange.run(lambda: self._exchange.read(np.empty(0, np.int64), 0, refusal))
        host = ids.detach().cpu().numpy()
        rows = self._spread.rows_of(host)
        bags = Bags(host, offsets, rows != self._spread.padding) if self.mode else None
        rows = rows if bags is None else rows[bags.keep]
        shape = (*(ids.shape if bags is None else (bags.num,)), self.dim)
        pull, keep = partial(self._pull, rows, bags), partial(self._keep, rows, bags)
        found: Tensor = _Lookup.apply(self._handle, pull, keep, shape)  # type: ignore[no-untyped-call]
        return found.to(ids.device)

    def _pull(self, rows: Places, bags: Bags | None) -> Tensor:
        """Return ``(len(rows), dim)`` rows, or one vector per bag. Collective."""
        read = partial(self._exchange.read, rows, int(not self.training))
        values, index = self._exchange.run(read)
        if bags is None:
            return self._results.take(values, index)
        if not len(index):
            return torch.zeros(bags.num, self.dim, dtype=values.dtype)
        sums = bag_sums(values, index, bags.offsets)
        return sums if self.mode == "sum" else sums.div_(bags.counts(values.dtype))

    def _keep(self, rows: Places, bags: Bags | None, grad: Tensor) -> None:
        """Store the gradients of a lookup until the next step. Local."""
        grad, pending = grad.detach().reshape(-1, self.dim).contiguous(), self._gradients()
        if len(pending) == _MANY_LOOKUPS and self._exchange.comm.rank == 0 and not self.steps:
            self._warn(
                f"a table must step to release gradients, but the table of {self._what} keeps "
                f"gradients of {_MANY_LOOKUPS} lookups and has never stepped; call "
                f"table.step_with(optimizer), or table.step() in each step"
            )
        if bags is not None and self.mode == "mean":
            grad = grad / bags.counts(grad.dtype)
        keys = keys_of(rows, np.arange(len(rows)) if bags is None else bags.number)
        if self.padding_idx is not None:
            keys = keys[rows != self._spread.padding]
        self._pending = [*pending, (keys, grad)]
        self._handle.grad = torch.ones(())

    def _gradients(self) -> list[tuple[Places, Tensor]]:
        """Return the stored gradients; empty if ``zero_grad`` has cleared them."""
        return self._pending if self._handle.grad is not None and self._handle.grad else []

    def cache_report(self) -> tuple[CacheReport, ...]:
        """Return cache counters: the sum over all ranks, then one entry per rank. Collective."""
        exchange, call = self._exchange, f"report of {self._exchange.name}"
        by_rank = exchange.run(lambda: exchange.comm.allgather_object(exchange.cache.report, call))
        return CacheReport(*np.sum(by_rank, axis=0).tolist()), *by_rank

    # -- the step -----------------------------------------------------------------------------

    def set_num_samples(self, num_samples: float, nominal: float = 1.0) -> None:
        """Set the number of samples in this rank's mean loss, from the next step on.

        Like ``DistributedOptimizer.set_num_samples``: all ranks call this method, or none does.

        Raises:
            ConfigError: the count is not valid, or the optimizer of the table has its own count.
        """
        if _count_of(self._optimizer()) is not None:
            raise ConfigError(
                "sample counts of a table that steps with a DistributedOptimizer must be set by "
                "that optimizer; call set_num_samples of the DistributedOptimizer only"
            )
        self._samples.set(num_samples, nominal)

    def step_with(self, optimizer: Optimizer) -> None:
        """Call ``step`` after every step of ``optimizer``.

        ``optimizer.zero_grad()`` then also clears the gradients of this table.

        With a ``DistributedOptimizer`` the gradients are weighted by that optimizer's sample
        counts, and with ``op=Sum`` summed, not averaged. Local, but every rank calls this method.

        Raises:
            ConfigError: ``optimizer`` is not a torch optimizer, or this method was called before.
        """
        if not isinstance(optimizer, Optimizer):
            raise ConfigError(
                f"the optimizer of a table must be a torch.optim.Optimizer, got "
                f"{type(optimizer).__name__}; pass one, or call table.step() in each step"
            )
        if self._optimizer() is not None:
            raise ConfigError(
                "step_with must be called once for each table, but this table already steps with "
                "an optimizer; delete the second call"
            )
        table, self._optimizer = weakref.ref(self), weakref.ref(optimizer)

        def stepped(*_: object) -> None:
            if (one := table()) is not None:
                one.step()

        forget = optimizer.zero_grad

        def zero_grad(*args: Any, **options: Any) -> None:
            forget(*args, **options)
            if (one := table()) is not None:
                one.zero_grad()

        optimizer.register_step_post_hook(stepped)
        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]

    @torch.no_grad()
    @dynamo_disable
    def step(self) -> None:
        """Average the gradients over the ranks, and update rows with gradients. Collective.

        No-op if no rank has gradients, and for a frozen table. The gradients are cleared in any
        case, even after an error.

        Raises:
            MismatchError: ranks make different calls or have different ``lr``; only some ranks
                count samples, or have frozen the table; or the update has failed on a rank.
                Raised on every rank.
            NotInitializedError: the world of the table was shut down.
        """
        pending, self._pending = self._gradients(), []
        self._exchange.run(lambda: self._step(pending))

    def _step(self, pending: list[tuple[Places, Tensor]]) -> None:
        count, exchange = _count_of(self._optimizer()) or self._samples, self._exchange
        weight, is_frozen = count.weight, not self._handle.requires_grad
        flags = IS_COUNTED * count.is_set | IS_FROZEN * is_frozen
        is_none = (count.average and weight == 0.0) or is_frozen  # a mean of no samples is NaN
        sums = self._joined([] if is_none else pending)
        reports = exchange.agree("step", None, RowReport(len(sums), weight, self.lr, flags))
        require_same_step(reports)
        if not any(each.num_rows for each in reports):
            return
        if count.average:
            sums.factor = weight / (sum(each.weight for each in reports) or 1.0)
        own, failure = exchange.sum_own(sums, reports), None
        try:
            self._update(own)
        except (RuntimeError, MemoryError, ValueError) as error:
            failure = f"the owner could not update the rows of {exchange.name}: {error!r:.300}"
        exchange.agree("end of step", failure)
        self.steps += 1

    def _joined(self, pending: list[tuple[Places, Tensor]]) -> RowSums:
        """Return the gradients of several lookups, summed by row."""
        nothing = torch.empty(0, self.dim, dtype=self._memory.first.dtype)
        grads = [grad for _, grad in pending] or [nothing]
        bases = [0, *accumulate(map(len, grads))]
        keys = [keys + base for (keys, _), base in zip(pending, bases, strict=False)]
        joined = np.concatenate(keys or [np.empty(0, np.int64)])
        return RowSums(joined, grads[0] if len(grads) == 1 else torch.cat(grads))

    def _update(self, sums: RowSums) -> None:
        """Update the rows that this rank owns."""
        for part in sums.chunks():
            rows, grads = sums.rows[part], sums.of(part)
            if not math.isfinite(grads.sum()) and not grads.isfinite().all():
                self._warn(
                    f"gradients of a table should be finite, but a step of the table of "
                    f"{self._what} has NaN or inf; to leave out such a step, call zero_grad() of "
                    f"the model before it"
                )
            self._memory.step(rows, grads, self._rule, self.steps + 1)

    # -- checkpoints --------------------------------------------------------------------------

    def sharded_state(self) -> dict[str, Any]:
        """Return the rows and optimizer state of this rank, for a checkpoint. Local.

        The row of an id is ``id * factor % rows``, independent of the number of ranks; see
        ``IdSpread``.
        """
        pieces = self._memory.pieces()
        return {"table": self._what, "steps": self.steps, "lr": self.lr, "tensors": pieces}

    def wanted(self, path: str) -> dict[str, Shard]:
        """Return the shards that ``load(into=...)`` reads for this rank. Local.

        Args:
            path: path of the state in the checkpoint: keys joined by slashes, ``"model/table"``.
        """
        pieces = self._memory.pieces()
        return {f"{path}/tensors/{name}": own.shard for name, own in pieces.items()}

    def load_sharded_state(self, state: Mapping[str, Any]) -> None:
        """Restore a result of ``sharded_state`` of any number of ranks. Collective.

        The state does not contain rows that were never stepped; these get their initial values.

        Raises:
            CheckpointError: ``state`` is of another table, or not a result of ``sharded_state``;
                on every rank.
            MismatchError: ranks load states of different steps; on every rank.
        """
        self._exchange.require_world()
        comm = self._exchange.comm
        with agreed(comm, CheckpointError):
            self._memory.check(self._what, state)
        own = f"steps={state['steps']}, lr={state['lr']}"
        require_equal(comm, [own], "a table's state", "load the same checkpoint on every rank")
        self._memory.restore(state["tensors"])
        self.steps, self._pending = state["steps"], []
        self._rule.lr = learning_rate(state["lr"])
        comm.barrier()

    def _warn(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning(text)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise ``ConfigError``: rows are in the memory of several ranks, and cannot be copied."""
        raise ConfigError(
            "a ShardedEmbedding cannot be copied or pickled, since each rank stores a part; save "
            "its sharded_state() by hpctrain.checkpoint.Manager"
        )


class _Lookup(torch.autograd.Function):
    """Autograd function of a lookup: backward passes the gradient of the rows to ``keep``."""

    @staticmethod
    def forward(
        ctx: Any,
        handle: Tensor,
        pull: Callable[[], Tensor],
        keep: Callable[[Tensor], None],
        shape: tuple[int, ...],
    ) -> Tensor:
        """Call ``pull`` and return its result in the given shape."""
        del handle
        ctx.keep = keep
        found = pull().view(shape)
        # The tensor shares memory without being a view: autograd rejects in-place writes to views
        # that a function returns.
        return torch.empty(0, dtype=found.dtype).set_(
            found.untyped_storage(), found.storage_offset(), shape, found.stride()
        )

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        """Pass the gradient to ``keep``."""
        ctx.keep(grad)
        return (None,) * 4


class _Hidden(dict[str, nn.Parameter | None]):
    """Parameter dictionary that is visible only to ``zero_grad`` and ``requires_grad_``.

    Optimizers must not get the parameter in this dictionary. But ``parameters()`` reads the same
    dictionary as these two methods, so ``items`` inspects the call stack.
    """

    _SEEN_BY = (nn.Module.zero_grad.__code__, nn.Module.requires_grad_.__code__)
    _MOST_CALLS = 10  # number of stack frames that ``items`` inspects

    def items(self) -> Any:
        """Return the parameters if one of the two methods calls; else an empty view."""
        frames = islice(walk_stack(currentframe()), self._MOST_CALLS)
        is_seen = any(frame.f_code in self._SEEN_BY for frame, _ in frames)
        return super().items() if is_seen else {}.items()


def _count_of(optimizer: Optimizer | None) -> SampleCount | None:
    exchange = exchange_of(optimizer)
    return None if exchange is None else exchange.count
