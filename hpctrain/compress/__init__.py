"""Codecs: compression of gradients that are sent between nodes.

Every name is imported at its first use.
"""

from hpctrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
