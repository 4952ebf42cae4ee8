"""Start of every Python process below ``hpctrain shim``: ``import horovod`` finds ours.

``PYTHONPATH`` names this folder, so that a script, and Pythons that it starts, run as they would
without the shim. It leaves ``sys.path`` at once; another ``sitecustomize``, of the site, follows.
"""

import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = "HPCTRAIN_SHIM_PYTHON"
"""The variable that says which Python has hpctrain; others are left alone."""


def begin() -> None:
    """Install the shim, where this is the Python that it was asked for."""
    sys.path[:] = [folder for folder in sys.path if folder != str(HERE)]
    if os.environ.get(PYTHON) == sys.executable:
        before = list(sys.path)
        sys.path.insert(0, str(HERE.parents[2]))  # hpctrain may be in the folder of a script alone
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
