"""``hpctrain shim``: run a script that imports Horovod, unchanged, on hpctrain."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from hpctrain.cli.options import option
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.horovod.shim import sitecustomize

CONTEXT_SETTINGS = {"allow_extra_args": True, "allow_interspersed_args": False}
"""Options end where the script begins: those behind it are the script's own."""


class ShimCommand(TyperCommand):
    """Leaves all that stands behind ``-m MODULE`` to the module, as Python does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put an end of options behind the module."""
        num_words = 2 if args[:1] in (["-m"], ["--module"]) else 1
        if len(args) > num_words and args[0].startswith(("-m", "--module")):
            args = [*args[:num_words], "--", *args[num_words:]]
        return super().parse_args(ctx, args)


def shim(
    ctx: typer.Context,
    *,
    module: Annotated[
        str | None, option("MODULE", "Run a module, as `python -m`.", "-m", "--module")
    ] = None,
) -> None:
    """Run a script that says `import horovod.torch`, unchanged, with hpctrain in its place.

    `horovod`, `horovod.torch` and what scripts import from below them are hpctrain's, in this
    process and Pythons that it starts, whatever Horovod is installed. All else is as under `python
    SCRIPT`. A name that hpctrain lacks is an error that says so; `hpctrain guide migrate` has a
    row for every name.

    HPCTRAIN_ENGINE=horovod lets an installed Horovod move the data.

    Examples:
      hpctrain shim train.py --epochs 3

      hpctrain shim -m package.train --epochs 3

      hpctrain launch -n 4 hpctrain shim train.py

      srun hpctrain shim train.py
    """
    if module is not None:
        become(["-m", module, *ctx.args])
    if not ctx.args:
        raise ConfigError("a script is needed, got none; say e.g. `hpctrain shim train.py`")
    path = Path(ctx.args[0])
    if not path.is_file():
        raise LaunchError(
            f"a script is a file, {'a folder is' if path.is_dir() else 'nothing is'} at "
            f"{path.absolute()}; a module is run by `hpctrain shim -m MODULE`"
        )
    become(ctx.args)


def become(words: Sequence[str]) -> NoReturn:
    """Let ``python WORDS`` take the place of this process; ``import horovod`` finds ours there."""
    environ = {**os.environ, sitecustomize.PYTHON: sys.executable}
    folders = filter(None, [str(sitecustomize.HERE), environ.get("PYTHONPATH")])
    environ["PYTHONPATH"] = os.pathsep.join(folders)
    os.execve(sys.executable, [sys.executable, *words], environ)  # noqa: S606 - no shell is needed
