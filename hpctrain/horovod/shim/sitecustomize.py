"""Installs the shim when Python starts, in a script of ``hpctrain shim`` and its child processes.

``PYTHONPATH`` contains this folder, so that each Python process imports this file at its start.
The file removes the folder from ``sys.path``, and then imports the ``sitecustomize`` of the site,
as Python does without the shim.
"""

import importlib
import os
import sys
from pathlib import Path

HERE = Path(__file__).parent
PYTHON = "HPCTRAIN_SHIM_PYTHON"
"""Environment variable with the path of the Python interpreter that installs the shim."""


def begin() -> None:
    """Install the shim if ``HPCTRAIN_SHIM_PYTHON`` is the path of this Python interpreter.

    Then import the ``sitecustomize`` of the site, if there is one.
    """
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
