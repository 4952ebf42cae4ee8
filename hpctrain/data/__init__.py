"""Write and read sharded data sets, order their samples, and copy them to the nodes.

Each name of this package is imported at its first use.
"""

from hpctrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
