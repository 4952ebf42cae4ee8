"""Horovod's names for hpctrain, in this process: ``import horovod.torch as hvd`` finds ours.

``hpctrain shim train.py`` runs a script that is not changed at all. A program of its own says::

    import hpctrain.horovod.shim

    hpctrain.horovod.shim.install()

    import horovod.torch as hvd
"""

from hpctrain.horovod.shim.modules import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
