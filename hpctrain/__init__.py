"""Train PyTorch models across the nodes of a supercomputer, under plain ``mpirun`` or ``srun``.

Importing this package loads neither torch nor MPI: every name of ``__init__.pyi`` is loaded at its
first use. With ``import hpctrain as hvd`` a script written for ``horovod.torch`` runs as it is.
"""

from hpctrain.core.lazy import exports

__version__ = "0.1.0"

__getattr__, __dir__, __all__ = exports(__name__, __file__)
__all__ += ["__version__"]
