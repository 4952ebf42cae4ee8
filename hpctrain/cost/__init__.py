"""Models of the time of collectives, steps and runs on a machine.

Names are imported at their first use.
"""

from hpctrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__, __file__)
