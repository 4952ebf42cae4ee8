"""Moving bytes between ranks.

Every name is loaded at its first use.
"""

from typing import TYPE_CHECKING

from hpctrain.core.lazy import exports

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator

_HOME = {
    "hpctrain.comm.communicator": ("Communicator",),
}

__all__ = [
    "Communicator",
]

__getattr__, __dir__ = exports(__name__, _HOME)
