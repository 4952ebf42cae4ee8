"""A batch of operations that the ranks have decided to carry out together."""

from typing import NamedTuple

from hpctrain.negotiation.request import Signature


class Entry(NamedTuple):
    """One named operation that all ranks have announced."""

    name: str
    signature: Signature
    error: str | None
    """What to raise on every rank instead of carrying it out."""
    joined: bool
    """Whether some rank takes part with nothing, because it has joined."""


class OperationBatch(NamedTuple):
    """Operations to carry out now, in this order; the same on every rank."""

    entries: tuple[Entry, ...]
    join_over: int | None
    """The rank that joined last, when all have joined: nobody is joined any more."""
