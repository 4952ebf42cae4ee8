"""Attention over a sequence that is divided among ranks: by heads (Ulysses), or around a ring."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import scaled_dot_product_attention

from hpctrain.core.errors import ConfigError
from hpctrain.parallel.mesh import require_one_axis


def context_attention(query: Tensor, key: Tensor, value: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return causal attention over a sequence that is divided among ranks. Collective.

    Rank r has part r of the sequence; all parts have the same length. If the number of heads is a
    multiple of the number of ranks, each rank computes attention of some heads over the whole
    sequence, with one all-to-all before and one after. Otherwise keys and values are sent around a
    ring, and a rank stores the keys and values of two parts at a time.

    Args:
        query: ``(n, heads, length / size, head_width)`` for n samples and ``size`` ranks, floating
            point, on the CPU or a device.
        key: tensor of the same shape.
        value: tensor of the same shape.
        mesh: one axis, such as ``build_mesh(cp=2)["cp"]``.

    Returns:
        The result of ``scaled_dot_product_attention(..., is_causal=True)`` for the part of this
        rank.

    Raises:
        ConfigError: the shapes differ from each other, or the mesh has several axes.

    Source: Jacobs et al. 2023, arXiv:2309.14509 (Ulysses); Liu et al. 2023, arXiv:2310.01889
    (ring). Differs: parts are contiguous; with causal attention in a ring, rank 0 therefore has
    the least work and waits for the last rank.
    """
    require_one_axis(mesh, "cp")
    if not query.shape == key.shape == value.shape:
        raise ConfigError(
            f"query, key and value of context parallel attention must have the same "
            f"shape, got {tuple(query.shape)}, {tuple(key.shape)} and "
            f"{tuple(value.shape)}; repeat the heads of keys and values"
        )
    size, group = mesh.size(), mesh.get_group()
    if size == 1:
        return scaled_dot_product_attention(query, key, value, is_causal=True)
    if query.shape[1] % size:
        out: Tensor = _Ring.apply(query, key, value, group)  # type: ignore[no-untyped-call]
        return out
    together = torch.stack((query, key, value))
    # Shape (size, 3, n, heads / size, part, width); the first index is the destination rank.
    parts = together.unflatten(2, (size, -1)).movedim(2, 0)
    q, k, v = _exchanged(parts, group).movedim(0, 3).flatten(3, 4)
    seen = scaled_dot_product_attention(q, k, v, is_causal=True)
    back = _exchanged(seen.unflatten(2, (size, -1)).movedim(2, 0), group)
    return back.movedim(0, 1).flatten(1, 2)


def _exchanged(parts: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Send part ``i`` to rank ``i``, and return the received parts in rank order. Collective."""
    out: Tensor = _Exchange.apply(parts, group)  # type: ignore[no-untyped-call]
    return out


class _Exchange(torch.autograd.Function):
    """All-to-all of parts; backward is the same all-to-all of the gradients."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        given = parts.contiguous()
        out: Tensor = torch.empty_like(given)
        dist.all_to_all_single(out, given, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _Exchange.forward(ctx, gradients[0], ctx.group), None


class _Ring(torch.autograd.Function):
    """Ring attention: this rank's queries attend to one part of the keys and values at a time.

    Keys and values of 16 bits are sent in 16 bits; the computation is in float32.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.group = group
        wide = _wide(query)
        out, weight = torch.zeros_like(wide), wide.new_full((*query.shape[:-1], 1), -torch.inf)
        for source, *parts in _around(group, key, value):
            keys, values = map(_wide, parts)
            if source <= dist.get_rank(group):
                scores = _scores(wide, keys, is_own=source == dist.get_rank(group))
                found = scores.logsumexp(-1, keepdim=True)
                total = torch.logaddexp(weight, found)
                out = out * (weight - total).exp() + (scores - total).exp() @ values
                weight = total
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, weight)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        narrow, key, value, out, weight = ctx.saved_tensors
        gradient, query = _wide(gradients[0]), _wide(narrow)
        scale = query.shape[-1] ** -0.5
        rank, share = dist.get_rank(ctx.group), (gradient * out).sum(-1, keepdim=True)
        of_query = torch.zeros_like(query)
        grown: tuple[Tensor, ...] = torch.zeros_like(query), torch.zeros_like(query)
        for source, *parts in _around(ctx.group, key, value):
            keys, values = map(_wide, parts)
            if source <= rank:
                likely = (_scores(query, keys, is_own=source == rank) - weight).exp()
                steep = likely * (gradient @ values.mT - share)
                of_query += steep @ keys * scale
                grown = (grown[0] + steep.mT @ query * scale, grown[1] + likely.mT @ gradient)
            # Gradients are sent around the ring together with their keys and values; after the
            # last iteration, each rank has the gradients of its own part.
            grown = _pass_on(ctx.group, *grown)
        of_query, of_key, of_value = (each.to(key.dtype) for each in (of_query, *grown))
        return of_query, of_key, of_value, None


def _wide(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.element_size() < 4 else tensor


def _scores(query: Tensor, keys: Tensor, *, is_own: bool) -> Tensor:
    """Return attention scores, ``(n, heads, part, part)``.

    With ``is_own``, queries and keys are of the same part, and keys after a query get -inf.
    """
    scores: Tensor = query @ keys.mT * query.shape[-1] ** -0.5
    if is_own:
        ahead = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(ahead, -torch.inf)
    return scores


def _around(group: dist.ProcessGroup, *tensors: Tensor) -> Any:
    """Yield ``(rank, *tensors of this rank)`` for each rank of the ring. Collective.

    The order is: this rank, then the rank before it, and so on around the ring.
    """
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    for turn in range(size):
        yield (rank - turn) % size, *tensors
        if turn < size - 1:
            tensors = _pass_on(group, *tensors)


def _pass_on(group: dist.ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Send tensors to the next rank, and return the tensors of the previous rank. Collective."""
    ranks, rank = dist.get_process_group_ranks(group), dist.get_rank(group)
    following, before = ranks[(rank + 1) % len(ranks)], ranks[rank - 1]
    given = torch.stack([tensor.contiguous() for tensor in tensors])
    taken = torch.empty_like(given)
    operations = [
        dist.P2POp(dist.isend, given, following, group=group),
        dist.P2POp(dist.irecv, taken, before, group=group),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    return taken.unbind()
