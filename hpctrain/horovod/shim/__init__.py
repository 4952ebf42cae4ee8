"""Shim that provides Horovod's module names: ``import horovod.torch`` imports hpctrain.

``hpctrain shim train.py`` runs an unchanged script of Horovod. A program can also install the
names itself::

    import hpctrain.horovod.shim

    hpctrain.horovod.shim.install()

    import horovod.torch as hvd
"""

from hpctrain.horovod.shim.modules import install, is_installed, uninstall

__all__ = ["install", "is_installed", "uninstall"]
