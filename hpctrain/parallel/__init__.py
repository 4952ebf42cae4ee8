"""Models larger than one rank, divided with PyTorch's parallelism and placed by topology.

Every name is loaded at its first use.
"""

from hpctrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
