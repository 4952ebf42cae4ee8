"""The command ``hpctrain``. Commands load what is heavy only when they run."""

import platform
import sys
import time
import traceback
from contextlib import suppress
from typing import Annotated

import typer

from hpctrain import __version__
from hpctrain.cli.bench import bench
from hpctrain.cli.checkpoint import checkpoint
from hpctrain.cli.data import data
from hpctrain.cli.doctor import doctor
from hpctrain.cli.evaluate import evaluate, predict
from hpctrain.cli.examples import examples
from hpctrain.cli.guide import guide
from hpctrain.cli.horovod import horovod
from hpctrain.cli.launch import CONTEXT_SETTINGS, launch
from hpctrain.cli.options import flag, unwrap_help
from hpctrain.cli.plan import plan
from hpctrain.cli.results import compare, plot, report, runs
from hpctrain.cli.shim import CONTEXT_SETTINGS as SHIM_SETTINGS
from hpctrain.cli.shim import ShimCommand, shim
from hpctrain.cli.status import status
from hpctrain.cli.study import study
from hpctrain.cli.submit import SubmitCommand, submit
from hpctrain.cli.top import top
from hpctrain.cli.train import train
from hpctrain.core.errors import (
    HpctrainError,
    LaunchError,
    MismatchError,
    NotFiniteError,
    ReplicaError,
)

USAGE_ERROR = 2
ROOT_SPEAKS_S = 2.0  # time in which rank 0's error ends the job, so that no other rank repeats it

EXAMPLES = """
For instance:

  hpctrain train my.toml --init        write a file with every key

  hpctrain train my.toml --dry-run     build everything, train nothing

  hpctrain launch -n 4 hpctrain train my.toml

  hpctrain launch -n 4 --nodes 2 python script.py

  hpctrain launch -n 4 hpctrain shim horovod_script.py

  hpctrain launch -n 4 hpctrain bench allreduce --peers

  hpctrain evaluate runs/digits        test what a run has learnt

  hpctrain predict runs/digits --output predictions.h5

  hpctrain plan runs/digits --machine machine.toml --target-loss 0.1

  hpctrain plan --params 70e9 --nodes 16 --gpus-per-node 8

  hpctrain submit my.toml --nodes 2 --tasks 2 --time 30min

  hpctrain top runs/digits             a job at work, rank by rank

  hpctrain report runs/a runs/b        curves, differences, ranks: a page

  hpctrain study run strong.toml       how a training scales, measured

  hpctrain doctor                      what is wrong with this machine or job

  hpctrain data pack photos/ data/train

  hpctrain data verify data/train

  hpctrain checkpoint verify runs/digits

  hpctrain horovod build               Horovod itself, for HPCTRAIN_ENGINE=horovod

  hpctrain guide data                  the manual, by topic

  hpctrain examples                    the files that the manual names as examples/
"""

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train)
app.command()(evaluate)
app.command()(predict)
app.command(context_settings=CONTEXT_SETTINGS)(launch)
app.command(cls=ShimCommand, context_settings=SHIM_SETTINGS)(shim)
app.command(cls=SubmitCommand)(submit)
app.command()(status)
app.command()(top)
for command in (plot, report, compare, runs):
    app.command()(command)
app.add_typer(study)
app.add_typer(bench)
app.command()(plan)
app.add_typer(data)
app.add_typer(checkpoint)
app.add_typer(horovod)
app.command()(doctor)
app.command()(guide)
app.command()(examples)
unwrap_help(app)


@app.callback(invoke_without_command=True)
def hpctrain(
    context: typer.Context,
    *,
    version: Annotated[bool, flag("Print the version and stop.", "--version")] = False,
) -> None:
    """Train PyTorch models across the nodes of a supercomputer, under plain mpirun or srun."""
    if version:
        typer.echo(f"hpctrain {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line; an error of ours is one line on stderr and exit code 2, or 1."""
    if platform.system() == "Windows":
        sys.stderr.write(
            "hpctrain: Windows itself has no MPI that hpctrain runs on; start it inside WSL: "
            "https://learn.microsoft.com/windows/wsl/install\n"
        )
        sys.exit(USAGE_ERROR)
    try:
        app()
    except HpctrainError as error:
        _stop(error)
    except Exception as error:  # of a script or model of the user's
        if _rank()[1]:
            raise  # the hooks of the world tell it
        if str(error).startswith("cannot load MPI library"):  # mpi4py's words
            _stop(_without_mpi(error))
        _tell(error)
        sys.exit(1)


def _without_mpi(error: Exception) -> LaunchError:
    """Say what brings an MPI library where there is none."""
    from hpctrain.launch.pmi import load  # noqa: PLC0415

    try:
        load()
    except LaunchError as told:
        return told
    return LaunchError(str(error))


def _tell(error: Exception) -> None:
    """Tell an error in the user's own code by the user's frames; keep all of it in the log.

    Raises ``error`` itself where it is none of the user's.
    """
    from hpctrain.core.user_error import folded  # noqa: PLC0415

    module = sys.modules.get("hpctrain.runtime.world")
    is_joined = module is not None and module.is_initialized()
    folder = module.current().settings.log_dir if module is not None and is_joined else None
    log = folder / "rank-0.log" if folder else None
    text = folded(error, log)
    if not text:
        raise error
    if log is not None:
        with suppress(OSError), log.open("a", encoding="utf-8") as file:
            file.write("".join(traceback.format_exception(error)))
    sys.stderr.write(f"hpctrain: {text}\n")


def _stop(error: HpctrainError) -> None:
    """Say once what all ranks met, and stop; what one rank met alone is raised again."""
    rank, is_joined = _rank()
    code = 1 if isinstance(error, NotFiniteError | ReplicaError) else USAGE_ERROR
    if is_joined and not isinstance(error, MismatchError | NotFiniteError):
        raise error  # the hooks of the world tag it with the rank and end all others
    if rank and not is_joined:
        # Rank 0 has most likely met the same, and its end is the end of this process too.
        time.sleep(ROOT_SPEAKS_S)
        sys.stderr.write(f"hpctrain: rank {rank}: {error}\n")
    elif not rank:
        sys.stderr.write(f"hpctrain: {error}\n")
    sys.exit(code)


def _rank() -> tuple[int, bool]:
    """This rank, as the world or else the launcher says, and whether it has joined others."""
    from hpctrain.cluster.env import launched  # noqa: PLC0415

    module = sys.modules.get("hpctrain.runtime.world")
    if module is not None and module.is_initialized():
        return module.rank(), module.size() > 1
    found = launched()
    return (found.rank if found else 0), False
