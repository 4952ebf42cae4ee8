"""Train PyTorch models across the nodes of a supercomputer, under plain ``mpirun`` or ``srun``.

Importing this package loads neither torch nor MPI: every name of ``__init__.pyi`` is loaded at its
first use. With ``import hpctrain as hvd`` a script written for ``horovod.torch`` runs as it is.

Where torch is loaded, it learns of the backend ``hpctrain`` of ``torch.distributed``.
"""

import importlib
import sys

from hpctrain.core.lazy import exports

importlib.import_module("hpctrain.core.paths")  # notes the directory of this moment

__version__ = "1.0.0rc1"

__getattr__, __dir__, __all__ = exports(__name__, __file__)
__all__ += ["__version__"]

if "torch.distributed" in sys.modules:  # else torch calls it, by the entry point `torch.backends`
    importlib.import_module("hpctrain.runtime.torch_backend").register()
