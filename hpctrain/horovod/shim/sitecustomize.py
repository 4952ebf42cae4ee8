"""Installs the shim at the start of every Python process below ``hpctrain shim``.

``PYTHONPATH`` contains this folder, so that a script, and Python processes that it starts, run as
without the shim. The folder is removed from ``sys.path`` at once, and the ``sitecustomize`` of the
site is imported next.
"""

import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = "HPCTRAIN_SHIM_PYTHON"
"""Environment variable with the path of the Python that has hpctrain; others are unchanged."""


def begin() -> None:
    """Install the shim, if this is the Python of ``HPCTRAIN_SHIM_PYTHON``."""
    sys.path[:] = [folder for folder in sys.path if folder != str(HERE)]
    if os.environ.get(PYTHON) == sys.executable:
        before = list(sys.path)
        sys.path.insert(0, str(HERE.parents[2]))  # hpctrain may not be installed
        try:
            from hpctrain.horovod.shim.modules import install  # noqa: PLC0415

            install()
        finally:
            sys.path[:] = before
    own = sys.modules.pop("sitecustomize")
    try:
        importlib.import_module("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = own


if __name__ == "sitecustomize":
    begin()
