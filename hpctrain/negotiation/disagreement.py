"""What to say when ranks give one name to operations that do not fit together."""

from collections.abc import Sequence

from hpctrain.core.units import format_ranks
from hpctrain.negotiation.request import Kind, Signature

_NUM_SHOWN = 3
"""Tensors of a group that are described: the first ones that differ."""

Given = Sequence[tuple[Signature, Sequence[int]]]
"""Each description and the ranks that gave it."""


def disagreement(name: str, given: Given) -> str:
    """Say who gave what for ``name``."""
    signatures, note = _differing([signature for signature, _ in given])
    texts = [signature.describe() for signature in signatures]
    if len(set(texts)) < len(texts):
        texts = [str(tuple(signature)) for signature in signatures]
    sides = " and ".join(
        f"{text} on {format_ranks(ranks)}"
        for text, (_, ranks) in zip(texts, given, strict=True)
    )  # fmt: skip
    return (
        f'operation "{name}" must be the same on all ranks, got {sides}{note}; submit it with the '
        f"same kind, dtype, shape, op, factors, root rank and device on every rank, or give "
        f"different operations different names"
    )


def missing_root(name: str, signature: Signature, given: Sequence[int]) -> str | None:
    """Say that the root of a broadcast has joined, if ``given`` lacks it."""
    if signature.kind is not Kind.BROADCAST or signature.root in given:
        return None
    return (
        f'the root of a broadcast must take part in it, "{name}" is to come from rank '
        f"{signature.root}, which has joined; let that rank join after its last broadcast, or "
        f"choose another root rank"
    )


def _differing(signatures: list[Signature]) -> tuple[list[Signature], str]:
    """Leave out of large groups the tensors on which all agree; say which are left."""
    counts = {len(signature.dtypes) for signature in signatures}
    total = max(counts)
    if total <= _NUM_SHOWN or len(counts) > 1:
        return signatures, ""
    kept = [
        index
        for index in range(total)
        if len({(s.dtypes[index], s.shapes[index], s.devices[index]) for s in signatures}) > 1
    ][:_NUM_SHOWN]
    shown = [
        signature._replace(
            dtypes=tuple(signature.dtypes[index] for index in kept),
            shapes=tuple(signature.shapes[index] for index in kept),
            devices=tuple(signature.devices[index] for index in kept),
        )
        for signature in signatures
    ]
    places = ", ".join(str(index + 1) for index in kept)
    return shown, f" (tensors {places} of a group of {total})" if kept else f" ({total} tensors)"
