"""Train PyTorch models across the nodes of a supercomputer, under plain ``mpirun`` or ``srun``.

Importing this package loads neither torch nor MPI: every name of ``__init__.pyi`` is loaded at its
first use. A script written for ``horovod.torch`` runs unchanged with ``import hpctrain as hvd``.

If torch is already loaded, this import registers the ``torch.distributed`` backend ``hpctrain``.
"""

import importlib
import sys

from hpctrain.core.lazy import exports

importlib.import_module("hpctrain.core.paths")  # stores the current directory

__version__ = "1.0.0rc1"

__getattr__, __dir__, __all__ = exports(__name__, __file__)
__all__ += ["__version__"]

# Otherwise `import torch` calls `register` later, through the entry point `torch.backends`.
if "torch.distributed" in sys.modules:
    importlib.import_module("hpctrain.runtime.torch_backend").register()
