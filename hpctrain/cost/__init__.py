"""Models of the time of collectives, steps and runs on a machine.

The modules of exported names are imported when a name is first used.
"""

from hpctrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
