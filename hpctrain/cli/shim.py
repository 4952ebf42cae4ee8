"""``hpctrain shim``: run a script that imports Horovod, unchanged, on hpctrain."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer
from typer.core import TyperCommand

from hpctrain.cli.options import option
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.horovod.shim import sitecustomize

app = typer.Typer()


class ShimCommand(TyperCommand):
    """Command that passes all arguments after ``-m MODULE`` to the module, as Python does."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments, with ``--`` inserted after the module."""
        num_words = 2 if args[:1] in (["-m"], ["--module"]) else 1
        if len(args) > num_words and args[0].startswith(("-m", "--module")):
            args = [*args[:num_words], "--", *args[num_words:]]
        return super().parse_args(ctx, args)


@app.command(
    cls=ShimCommand, context_settings={"allow_extra_args": True, "allow_interspersed_args": False}
)
def shim(
    ctx: typer.Context,
    *,
    module: str | None = option(None, "MODULE", "Run a module, as `python -m`.", "-m", "--module"),
) -> None:
    """Run a script that imports Horovod, unchanged, on hpctrain.

    `horovod`, `horovod.torch` and the modules below them are implemented by hpctrain, in this
    process and in Python processes that it starts, also where Horovod is installed. Everything
    else behaves as with `python SCRIPT`. A name that hpctrain lacks is an error with a remedy;
    the table in `hpctrain guide migrate` lists every name.

    With HPCTRAIN_ENGINE=horovod an installed Horovod transfers the data.

    Examples:
      hpctrain shim train.py --epochs 3

      hpctrain shim -m package.train --epochs 3

      hpctrain launch -n 4 hpctrain shim train.py

      srun hpctrain shim train.py
    """
    if module is not None:
        become(["-m", module, *ctx.args])
    if not ctx.args:
        raise ConfigError("shim must get a script, got none; use `hpctrain shim train.py`")
    path = Path(ctx.args[0])
    if not path.is_file():
        raise LaunchError(
            f"shim must get a file, but {path.absolute()} "
            f"{'is a directory' if path.is_dir() else 'does not exist'}; "
            f"`hpctrain shim -m MODULE` runs a module"
        )
    become(ctx.args)


def become(words: Sequence[str]) -> NoReturn:
    """Replace this process by ``python WORDS``; there, ``import horovod`` imports hpctrain."""
    environ = {**os.environ, sitecustomize.PYTHON: sys.executable}
    folders = filter(None, [str(sitecustomize.HERE), environ.get("PYTHONPATH")])
    environ["PYTHONPATH"] = os.pathsep.join(folders)
    os.execve(sys.executable, [sys.executable, *words], environ)  # noqa: S606 - needs no shell
