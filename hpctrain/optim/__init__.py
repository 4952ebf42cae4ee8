"""Training with large batches: LARS, LAMB, learning rates and the gradient noise scale.

No module here communicates with other ranks. Every name is loaded at its first use.
"""

from hpctrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
