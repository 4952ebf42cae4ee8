"""The process group for torch.distributed, with the methods that torch calls.

Torch 2.13 renamed some methods, and different versions and code paths call either name.
"""

import functools
import math
from collections.abc import Callable, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

from hpctrain.comm.process_group.ordered import GroupRankLostError, OrderedGroup, on_cpu
from hpctrain.comm.process_group.reductions import (
    LARGE_BYTES,
    BucketsInPlace,
    GroupReduction,
    allreduce,
    sparse_sum,
)
from hpctrain.comm.process_group.transfers import Transfers
from hpctrain.comm.process_group.work import Message
from hpctrain.comm.tensor_arguments import copy_back, flat_of, name_of
from hpctrain.comm.tensor_bucket import PackedTensors

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator
    from hpctrain.comm.hierarchical import HierarchicalCommunicator
    from hpctrain.comm.process_group.memory_transfers import NodeExchange

_LARGEST_TAG = 2**31 - 1


class HpctrainGroup(OrderedGroup):
    """A process group of torch.distributed that communicates with a ``Communicator``.

    The constructor is collective and has the arguments of ``OrderedGroup``.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._transfers = _transfers_of(self.comm)
        self._in_place = BucketsInPlace.of(self.comm)

    # -- reductions -------------------------------------------------------------------------

    @on_cpu
    def allreduce(self, tensors: Any, opts: Any = None, *, op: Any = None) -> dist.Work:
        """Replace each tensor by its reduction over the ranks."""
        given, how = _listed(tensors), GroupReduction.of(op if op is not None else opts)
        first = given[0]
        comm: Communicator | BucketsInPlace = self.comm
        if first.numel() * first.itemsize >= LARGE_BYTES and self._in_place is not None:
            comm = self._in_place
            if first.layout is torch.strided:
                comm.offer(first)

        def reduce() -> None:
            for tensor in given:
                if tensor.layout is torch.sparse_coo:
                    sparse_sum(self.comm, tensor, how)
                else:
                    allreduce(comm, tensor, how)

        return self._start("all_reduce", reduce, given, opts, averages=how.averages)

    @on_cpu
    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> dist.Work:
        """Replace each tensor by its reduction, in one message if all have the same dtype."""
        given, how = list(tensors), GroupReduction.of(opts)

        def reduce() -> None:
            if len(given) == 1 or len({tensor.dtype for tensor in given}) > 1:
                for tensor in given:
                    allreduce(self.comm, tensor, how)
                return
            tensors = [_waited(tensor).data for tensor in given]
            packed = PackedTensors.copied(tensors)
            allreduce(self.comm, packed.flat, how)
            packed.unpack(tensors)

        return self._start("all_reduce of several", reduce, given, opts, averages=how.averages)

    @on_cpu
    def reduce(self, tensors: Any, opts: Any) -> dist.Work:
        """Replace each tensor by its reduction on the root; other ranks keep their tensors."""
        given, how, root = _listed(tensors), GroupReduction.of(opts), opts.rootRank

        def reduce() -> None:
            self._meet(f"reduce on {root}")
            for tensor in given:
                mine = tensor if self.comm.rank == root else tensor.detach().clone()
                allreduce(self.comm, mine, how)

        return self._start("reduce", reduce, given, opts, averages=how.averages)

    @on_cpu
    def reduce_scatter(self, outs: Any, parts: Any, opts: Any = None) -> dist.Work:
        """Reduce ``parts[i][r]`` over the ranks, and store the result in ``outs[i]`` of rank r."""
        how = GroupReduction.of(opts)
        pairs = list(zip(_listed(outs), _lists(parts), strict=True))

        def reduce() -> None:
            for out, of_ranks in pairs:
                self._check_parts("reduce_scatter", of_ranks, out)
                self._reduce_scatter(out, [_flat_of(part) for part in of_ranks], how)

        return self._start(
            "reduce_scatter", reduce, [out for out, _ in pairs], opts, averages=how.averages
        )

    @on_cpu
    def reduce_scatter_single(self, out: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """Replace ``out`` by the reduction of this rank's part of ``given``."""
        return self._reduce_scatter_singles("reduce_scatter_single", [out], [given], opts)

    @on_cpu
    def reduce_scatter_single_coalesced(
        self, outs: Any, given: Any, opts: Any = None
    ) -> dist.Work:
        """Call ``reduce_scatter_single`` for each pair of tensors."""
        return self._reduce_scatter_singles("reduce_scatter_single of several", outs, given, opts)

    def _reduce_scatter_singles(
        self, name: str, outs: Sequence[Tensor], given: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        how = GroupReduction.of(opts)

        def reduce() -> None:
            for out, whole in zip(outs, given, strict=True):
                self._check_whole(name, whole, out)
                self._reduce_scatter(out, _flat_of(whole).view(self.comm.size, -1).unbind(), how)

        return self._start(name, reduce, list(outs), opts, averages=how.averages)

    def _reduce_scatter(self, out: Tensor, parts: Sequence[Tensor], how: GroupReduction) -> None:
        values = _flat_of(out)
        parts = [how.weighted(part) for part in parts]
        self._transfers.reduce_scatter(values, parts, how.op, how.scale(out.dtype, self.comm.size))
        how.finish(values, self.comm.size)
        _put_back(values, out)

    # -- data movement ----------------------------------------------------------------------

    @on_cpu
    def broadcast(self, tensors: Any, opts: Any = None, *, root: int | None = None) -> dist.Work:
        """Replace each tensor by the tensor of the root."""
        given = _listed(tensors)
        source: int = opts if isinstance(opts, int) else opts.rootRank if root is None else root

        def move() -> None:
            for tensor in given:
                values = _flat_of(tensor)
                self._transfers.broadcast(values, source)
                _put_back(values, tensor)

        return self._start("broadcast", move, given, opts)

    @on_cpu
    def allgather(self, outs: Any, given: Any, opts: Any = None) -> dist.Work:
        """Copy ``given[i]`` of each rank r to ``outs[i][r]`` on all ranks."""
        pairs = list(zip(_lists(outs), _listed(given), strict=True))

        def move() -> None:
            for of_ranks, tensor in pairs:
                self._check_parts("all_gather", of_ranks, tensor)
                self._all_gather(of_ranks, tensor)

        return self._start("all_gather", move, [list(of_ranks) for of_ranks, _ in pairs], opts)

    @on_cpu
    def allgather_coalesced(self, outs: Any, given: Any, opts: Any = None) -> dist.Work:
        """Copy ``given[i]`` of each rank r to ``outs[r][i]`` on all ranks."""
        return self.allgather([list(one) for one in zip(*outs, strict=True)], given, opts)

    @on_cpu
    def all_gather_single(self, out: Tensor, given: Tensor, opts: Any = None) -> dist.Work:
        """Concatenate ``given`` of all ranks in ``out``."""
        return self._all_gather_singles("all_gather_single", [out], [given], opts)

    @on_cpu
    def all_gather_single_coalesced(self, outs: Any, given: Any, opts: Any = None) -> dist.Work:
        """Call ``all_gather_single`` for each pair of tensors."""
        return self._all_gather_singles("all_gather_single of several", outs, given, opts)

    def _all_gather_singles(
        self, name: str, outs: Sequence[Tensor], given: Sequence[Tensor], opts: Any
    ) -> dist.Work:
        def move() -> None:
            for out, tensor in zip(outs, given, strict=True):
                self._check_whole(name, out, tensor)
                values = _flat_of(out)
                self._all_gather(values.view(self.comm.size, -1).unbind(), tensor)
                _put_back(values, out)

        return self._start(name, move, list(outs), opts)

    def _all_gather(self, outs: Sequence[Tensor], tensor: Tensor) -> None:
        values = [_flat_of(out) for out in outs]
        self._transfers.all_gather(values, _flat_of(tensor))
        _put_all_back(values, outs)

    @on_cpu
    def gather(self, outs: Any, given: Any, opts: Any) -> dist.Work:
        """Copy ``given[i]`` of each rank r to ``outs[i][r]`` on the root."""
        root, tensors = opts.rootRank, _listed(given)
        lists = _lists(outs) if self.comm.rank == root else [None] * len(tensors)

        def move() -> None:
            for of_ranks, tensor in zip(lists, tensors, strict=True):
                self._check_parts("gather", of_ranks, tensor, are_alike=True)
                values = None if of_ranks is None else [_flat_of(out) for out in of_ranks]
                self._transfers.gather(values, _flat_of(tensor), root)
                _put_all_back(values or (), of_ranks or ())

        return self._start("gather", move, tensors, opts)

    @on_cpu
    def scatter(self, outs: Any, parts: Any, opts: Any) -> dist.Work:
        """Copy ``parts[i][r]`` of the root to ``outs[i]`` of each rank r."""
        root, tensors = opts.rootRank, _listed(outs)
        lists = _lists(parts) if self.comm.rank == root else [None] * len(tensors)

        def move() -> None:
            for tensor, of_ranks in zip(tensors, lists, strict=True):
                self._check_parts("scatter", of_ranks, tensor, are_alike=True)
                given = None if of_ranks is None else [_flat_of(part) for part in of_ranks]
                values = _flat_of(tensor)
                self._transfers.scatter(values, given, root)
                _put_back(values, tensor)

        return self._start("scatter", move, tensors, opts)

    @on_cpu
    def alltoall(self, outs: Any, parts: Any, opts: Any = None) -> dist.Work:
        """Send ``parts[r]`` to rank r; store the received tensors in ``outs``."""

        def move() -> None:
            values = [_flat_of(out) for out in outs]
            self._transfers.all_to_all(values, [_flat_of(part) for part in parts])
            _put_all_back(values, outs)

        return self._start("all_to_all", move, list(outs), opts)

    @on_cpu
    def all_to_all_single(
        self,
        out: Tensor,
        given: Tensor,
        out_sizes: Sequence[int] = (),
        sizes: Sequence[int] = (),
        opts: Any = None,
    ) -> dist.Work:
        """Split ``given`` along dimension 0, and exchange the parts as ``alltoall`` does."""
        parts, outs = self._cut(given, sizes), self._cut(out, out_sizes)

        def move() -> None:
            values = _flat_of(out)
            taken = values.split([part.numel() for part in outs])
            self._transfers.all_to_all(taken, [_flat_of(part) for part in parts])
            _put_back(values, out)

        return self._start("all_to_all_single", move, [out], opts)

    def _cut(self, tensor: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        size, length = self.comm.size, tensor.shape[0] if tensor.dim() else 0
        if not sizes and length % size:
            raise ValueError(
                f"the first dimension must be divisible by {size} ranks in all_to_all_single "
                f"without split sizes, got {length} rows; pass split sizes"
            )
        cut = list(sizes) or [length // size] * size
        if len(cut) != size or sum(cut) != length:
            raise ValueError(
                f"split sizes must be {size} numbers, one per rank, with the sum {length}, the "
                f"number of rows, got {cut}"
            )
        parts: tuple[Tensor, ...] = tensor.detach().split(cut)
        return parts

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until all ranks have called this method."""
        return self._start("barrier", self.comm.barrier, [], opts)

    def monitored_barrier(
        self,
        timeout: timedelta | float | None = None,
        wait_all_ranks: bool = False,  # noqa: FBT001, FBT002 - signature of torch
    ) -> None:
        """Wait until all ranks have called this method.

        After a timeout, the error names the missing ranks, and contains the wording of gloo.
        """
        limit, before = self._limit, (self._limit.timeout_s, self._limit.name)
        if timeout is not None:
            timeout_s = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
            limit.timeout_s, limit.name = timeout_s, "timeout"

        def wait_for_all() -> None:
            self._report_wait(math.inf)  # at once: a late rank must find the reports of all others
            self.comm.barrier()

        try:
            self._start(
                "monitored_barrier", wait_for_all, [], SimpleNamespace(asyncOp=False)
            ).wait()
        except GroupRankLostError as error:
            missing, me = self._missing(), self._ranks[self.comm.rank]
            named = missing if wait_all_ranks else missing[:1]
            text = (
                f"Rank {me} timed out in monitoredBarrier after {1e3 * limit.timeout_s:.0f} ms, "
                f"Rank{'s' * (len(named) > 1)} {', '.join(map(str, named))} failed to pass "
                f"monitoredBarrier"
                if self.comm.rank == 0
                else f"Rank {me} successfully reached monitoredBarrier, but received errors while "
                f"waiting for send/recv from rank {self._ranks[0]}"
            )
            raise GroupRankLostError(f"{text}: {error}") from error
        finally:
            limit.timeout_s, limit.name = before

    # -- messages ---------------------------------------------------------------------------

    @on_cpu
    def send(self, tensors: Any, dest: int, tag: int = 0) -> dist.Work:
        """Start sending a tensor to rank ``dest``."""
        (tensor,), wire = _listed(tensors), self._messages(tag)
        with self._wire_lock:
            transfer = wire.start_send(_flat_of(tensor), dest, tag)
        what = f"send of {tensor.numel()} {name_of(tensor.dtype)} to {self._ranks[dest]}"
        return self._message(transfer, [tensor], f"{what}, tag {tag},", lambda: None)

    @on_cpu
    def recv(self, tensors: Any, source: int | None, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from rank ``source``; None means any rank."""
        (tensor,), wire = _listed(tensors), self._messages(tag)
        values = _flat_of(tensor)
        with self._wire_lock:
            transfer = wire.start_receive(values, source, tag)
        sender = "any" if source is None else self._ranks[source]
        what = f"recv of {tensor.numel()} {name_of(tensor.dtype)} from {sender}, tag {tag},"
        return self._message(transfer, [tensor], what, lambda: self._take(values, tensor))

    @on_cpu
    def recv_anysource(self, tensors: Any, tag: int = 0) -> dist.Work:
        """Start receiving a tensor from any rank."""
        return self.recv(tensors, None, tag)

    def _take(self, values: Tensor, tensor: Tensor) -> None:
        assert self._watch is not None, "a group that receives has a watch"
        self._watch.confirm()
        _put_back(values, tensor)

    def _message(
        self, transfer: Any, tensors: Sequence[Tensor], what: str, after: Callable[[], object]
    ) -> dist.Work:
        assert self._wire is not None, "a group that sends has a wire"
        named = functools.partial(self._named, what)
        work = Message(
            self._wire, transfer, tensors, after=after, lock=self._wire_lock, named=named
        )
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _messages(self, tag: int) -> Any:
        self._owner.check()
        if not 0 <= tag <= _LARGEST_TAG:
            raise ValueError(f"tag must be from 0 to {_LARGEST_TAG}, got {tag}")
        if self._wire is None or self._watch is None:
            raise ValueError(
                "a group must have two or more ranks to send and receive, got one; use a larger "
                "group, or copy the tensor"
            )
        self._watch.require_in_step()
        return self._wire

    def _check_parts(
        self,
        name: str,
        parts: Sequence[Tensor] | None,
        one: Tensor,
        *,
        are_alike: bool = False,
    ) -> None:
        """Raise on all ranks unless there is one part per rank, of the size of ``one``.

        If ``are_alike`` is False, only the size of this rank's own part is checked.
        """
        if parts is None:
            return
        numels, rank = [part.numel() for part in parts], self.comm.rank
        checked = numels if are_alike else numels[rank : rank + 1]
        if len(numels) != self.comm.size or set(checked) != {one.numel()}:
            whose = "each" if are_alike else "the rank's own"
            self._refuse(
                f"{name} must have a list of {self.comm.size} tensors, {whose} with "
                f"{one.numel()} elements like the single tensor, got {numels} elements"
            )

    def _check_whole(self, name: str, whole: Tensor, part: Tensor) -> None:
        if whole.numel() != part.numel() * self.comm.size:
            self._refuse(
                f"{name} must have a tensor for all ranks with {self.comm.size} times the "
                f"elements of the tensor of one rank, "
                f"got {whole.numel()} and {part.numel()} elements"
            )
        if whole.dtype != part.dtype:
            self._refuse(
                f"{name} must have tensors of one dtype, got {whole.dtype} and {part.dtype}"
            )

    # Names before torch 2.13.
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


def _listed(tensors: Any) -> list[Tensor]:
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _lists(tensors: Any) -> list[list[Tensor]]:
    """Return ``tensors`` as a list of lists; a single list becomes a list with one list."""
    is_one = bool(tensors) and isinstance(tensors[0], Tensor)
    return [list(tensors)] if is_one else [list(one) for one in tensors]


def _put_all_back(values: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    for flat, tensor in zip(values, tensors, strict=True):
        _put_back(flat, tensor)


# Tensors are written through ``data``, which does not change their version counter. As with other
# backends, tensors saved by autograd and views remain valid.


def _flat_of(tensor: Tensor) -> Tensor:
    return flat_of(_waited(tensor).data)


def _waited(tensor: Any) -> Tensor:
    """Return ``tensor`` after the completion of a pending functional collective on it.

    Only torch's own operators wait for such a collective automatically.
    """
    here: Tensor = tensor.trigger_wait() if hasattr(tensor, "trigger_wait") else tensor
    return here


def _put_back(values: Tensor, tensor: Tensor) -> None:
    copy_back(values, tensor.data)


def _transfers_of(comm: "Communicator") -> "Transfers | NodeExchange":
    """Create the object that moves tensors between the ranks of ``comm``. Collective."""
    if comm.node is None:
        return Transfers(comm)
    from hpctrain.comm.process_group.memory_transfers import by_memory  # noqa: PLC0415 - needs MPI

    return by_memory(cast("HierarchicalCommunicator", comm))
