"""The protocol of a part of a run whose state checkpoints hold."""

from collections.abc import Mapping
from typing import Any, Protocol


class Stateful(Protocol):
    """Has a state that the next step depends on, such as the error a codec has not sent yet.

    The state is a tree of tensors and plain values, each rank's own.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank; what is returned is not changed later."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state; it is that of the same rank of as many ranks."""
