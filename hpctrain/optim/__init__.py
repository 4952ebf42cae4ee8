"""Training with large batches: LARS, LAMB, learning rates and the gradient noise scale.

The modules of this package do not communicate with other ranks. Each name is imported at its first
use.
"""

from hpctrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
