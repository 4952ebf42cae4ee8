"""Reduction for ``shard="node"``: sums gradients and updates parameters chunk by chunk."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor
from torch.optim import Optimizer

from hpctrain.comm.call_check import call_of
from hpctrain.comm.ops import Op, combine_to, scaled_when
from hpctrain.core.errors import ConfigError
from hpctrain.gradients.bucket_layout import SharedGradientError
from hpctrain.gradients.elementwise import PieceStep
from hpctrain.gradients.gradient_bucket import Slot
from hpctrain.gradients.node_bucket import Change, Chunk, NodeBucket, NodeTensor, by_group
from hpctrain.gradients.node_values import NodeValues
from hpctrain.gradients.parameter_names import NamedParameters
from hpctrain.gradients.rail_sums import RailSums, weighted
from hpctrain.gradients.reduction import Reduction
from hpctrain.gradients.sparse_gradients import SparseSlot
from hpctrain.gradients.step_header import GradientFacts, ShardedFacts, StepAgreement, StepMessage


class ShardedReduction(Reduction):
    """Sums gradients chunk by chunk, and applies the optimizer step to each chunk.

    On a single node the sums are not stored.
    """

    _rails: RailSums | None = None  # sums between nodes; None on a single node
    _has_values = False  # whether node memory holds the parameters

    def prepare(self, rule: PieceStep, master_dtype: torch.dtype | None) -> None:
        """Create the objects for values in node memory and for sums between nodes. Collective."""
        node = self._comm.node
        assert node is not None
        self._node = node
        self.values = NodeValues(self._comm, node, rule, master_dtype)
        self._facts = self._comm.new_bucket(1, torch.float64)
        if self._comm.num_rails:
            self._rails = RailSums(self._comm, self.count, self._facts)
        share = torch.tensor([1.0 / node.local_size], dtype=torch.float64)
        self.num_nodes = round(self._comm.allreduce(share).item())

    def open(
        self,
        changed: NamedParameters | None,
        own_facts: ShardedFacts,
        optimizer: Optimizer,
        *,
        repeats: bool,
    ) -> StepAgreement:
        """Fill all buckets, and compare the ranks before a step. Collective.

        After this call the buckets of all ranks of the node are full until ``close``; with several
        nodes, the sums over all ranks are stored in node memory.

        Args:
            changed: current parameters if they do not match the buckets; else None.
            own_facts: facts of this rank for the step message.
            optimizer: optimizer whose state is shared.
            repeats: whether the gradients are from the previous step, without a later backward.
        """
        agreement, rails = self._opened(changed, own_facts, repeats=repeats), self._rails
        facts = agreement.sharded
        if rails is not None and facts.is_early:
            self._clocked(rails.finish)
        if changed is not None:
            self._has_values = False
            self.layout.build(changed)
        is_void = facts.is_void or changed is not None
        if is_void:
            self._fill_all()
        if not self._has_values:
            self.values.lay_out(self.layout.buckets)
            if rails is not None:
                rails.lay_out(self.layout.buckets)
        if not self._has_values or facts.is_written:
            self._has_values = False
            self.values.adopt(optimizer)
            self._has_values = True
        count = self.count
        weights = [float(peer.item()) for peer in self._facts.peers]
        self._factors = [count.factor_of(weight, count.exponent) for weight in weights]
        if rails is not None and (is_void or (facts.is_new and not facts.is_early)):
            self._clocked(rails.finish)
        return agreement

    def _opened(
        self, changed: NamedParameters | None, own_facts: ShardedFacts, *, repeats: bool
    ) -> StepAgreement:
        if changed is None and not own_facts.own_changed:
            try:
                self._fill_all()
            except SharedGradientError as error:  # the step message makes all ranks raise
                own_facts = replace(own_facts, own_changed=error.name)
        if self._rails is not None:
            own_facts = self._rails.with_sums_in_flight(own_facts)
        new_sparse = any(slot.found_sparse_dim is not None for slot in self.layout.dense)
        facts = StepMessage(gradients=GradientFacts(repeats=repeats), sharded=own_facts)
        mine = self._message(
            facts, new_sparse=new_sparse, outdated=changed is not None, needs_all=True
        )
        self._clocked(self._run(self._open, mine).wait)
        agreement = self._step.agreement
        assert agreement is not None
        if agreement.new_sparse:
            raise ConfigError(
                'gradients must be dense with shard="node", but a rank has a sparse gradient; '
                "make the layer with sparse=False, or leave shard out"
            )
        return agreement

    def _fill_all(self) -> None:
        """Fill the buckets whose sums are not in flight."""
        first = self._rails.num_sent if self._rails is not None else 0
        for bucket in self.layout.buckets[first:]:
            for slot in bucket.slots:
                self.take(slot)
            bucket.write_marks()
        if not first:
            self._facts.flat.fill_(self.count.weight)

    @property
    def _sums(self) -> list[NodeTensor]:
        """Sums of all buckets over all ranks; empty on a single node."""
        return [] if self._rails is None else self._rails.totals

    def take(self, slot: Slot | SparseSlot) -> None:
        """Copy a gradient of this rank to its slot."""
        assert isinstance(slot, Slot)
        self.layout.check_place(slot)
        with torch.no_grad():
            slot.fill(1.0, keeps_result=True)

    def ready(self, slot: Slot | SparseSlot) -> None:
        """Count a gradient that is in its slot; start sums between nodes if possible."""
        if self._rails is not None and self._has_values and isinstance(slot, Slot):
            self._rails.ready(slot, self.take)

    def forget(self) -> None:
        """Reset the state for the gradients of another step; all buckets become empty."""
        super().forget()
        if self._rails is not None:
            self._rails.expect()

    def update(self, rule: PieceStep, changes: Sequence[Change]) -> list[list[bool]]:
        """Average the gradients of each chunk of this rank, and update the chunk's parameters.

        Returns:
            For each bucket, which parameters have a gradient on any rank.
        """
        present = self._present()
        for bucket, are in zip(self.values.buckets, present, strict=True):
            have_all = all(are)
            for chunk in bucket.chunks:
                pieces, groups = chunk.pieces, chunk.groups
                if not have_all:
                    pieces = [piece for piece in pieces if are[piece.number]]
                    groups = by_group(pieces)
                if pieces:
                    self._sum(bucket, chunk)
                    for change, piece in product(changes, pieces):
                        change(piece.grad)
                    rule.step(groups)
                for piece in pieces:
                    bucket.keep(piece, rule.state[piece.values])
                    if bucket.has_masters:
                        piece.rounded.copy_(piece.values)
        return present

    def gradients(self, changes: Sequence[Change]) -> Iterator[Tensor]:
        """Yield each averaged gradient of this rank's slice; the next may overwrite its memory."""
        for bucket, are in zip(self.values.buckets, self._present(), strict=True):
            for chunk in bucket.chunks:
                pieces = [p for p in chunk.pieces if are[p.number] and p.grad.numel()]
                if pieces:
                    self._sum(bucket, chunk)
                for piece in pieces:
                    for change in changes:
                        change(piece.grad)
                    yield piece.grad

    def _present(self) -> list[list[bool]]:
        """Return, for each bucket, which parameters have a gradient on any rank."""
        found = []
        for number, bucket in enumerate(self.values.buckets):
            rows = [self._sums[number].shared] if self._sums else bucket.peers
            marks = [row[bucket.num_elements :].tolist() for row in rows]
            found.append(
                [any(one.real > 0 for one in column) for column in zip(*marks, strict=True)]
            )
        return found

    def close(self, failure: BaseException | None) -> None:
        """Wait until all ranks of the node have taken the step. Collective.

        Args:
            failure: error of this rank's step, or None; if any rank has an error, all ranks raise.
        """
        call = call_of("end of a step" if failure is None else f"failed step: {failure!r:.300}")
        self._clocked(self._run(partial(self._node.check_call, of_node=True), call).wait)
        if failure is not None:  # all ranks have failed with the same error
            raise failure
        if self._rails is not None:
            self._rails.learn()
        self.exposed_seconds = self._step.waited_s

    def norm_of_all(self, own: float, order: float) -> float:
        """Return the norm of the averaged gradients over the slices of all ranks. Collective.

        Args:
            own: largest absolute element of this rank's slice if ``order`` is infinite, else the
                sum of the absolute elements to the power ``order``.
            order: order of the norm.
        """
        total = torch.tensor([own], dtype=torch.float64)
        if math.isinf(order):
            return self._comm.allreduce(total, op=Op.MAX).item()
        powers = self._comm.allreduce(total).item() / self.num_nodes
        return float(powers ** (1.0 / order))

    def is_written(self, optimizer: Optimizer) -> bool:
        """Return whether the program has changed shared values on this rank. Not collective."""
        step = self.steps.number or 0
        if not self._has_values:
            return False
        if self.values.is_written(optimizer, step):
            return True
        return self.values.looks_at_all and self.values.has_hidden_stores(step)

    @property
    def is_stale(self) -> bool:
        """Whether the program has written to parameters, possibly some steps ago.

        Always False for models that are small enough to check all pages in every step.
        """
        values, step = self.values, self.steps.number or 0
        return self._has_values and not values.looks_at_all and values.has_hidden_stores(step)

    def _sum(self, bucket: NodeBucket, chunk: Chunk) -> None:
        """Set ``chunk.total`` to the average, or the sum, over all ranks."""
        if not self._sums:
            for out, parts in chunk.blocks:
                combine_to(out, weighted(parts, self._factors), bucket.how, self.count.scale)
            return
        _, late = scaled_when(self.count.scale_of(0), bucket.how)  # 16-bit sums are already scaled
        number = self.values.buckets.index(bucket)
        total = self._sums[number].shared[chunk.bounds].view(bucket.how.storage_dtype)
        combine_to(chunk.total, (total,), bucket.how, late)
