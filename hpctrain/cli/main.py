"""The command ``hpctrain``: the table of its commands, and the exit codes of errors."""

import importlib
import inspect
import platform
import sys
import time
import traceback
from contextlib import suppress
from typing import Any

try:  # this import takes the longest part of the start; typer handles SIGINT only after it
    import typer
    from typer.core import TyperCommand, TyperGroup
except KeyboardInterrupt:
    sys.stderr.write("hpctrain: interrupted\n")
    sys.exit(130)

from hpctrain import __version__
from hpctrain.cli.options import FAILED, flag
from hpctrain.core.errors import (
    HpctrainError,
    LaunchError,
    MismatchError,
    NotFiniteError,
    ReplicaError,
)
from hpctrain.core.lazy import postponed

with postponed("hpctrain", "hpctrain.cli"):
    from hpctrain.cluster import env
    from hpctrain.core import logs, user_error
    from hpctrain.launch import pmi

USAGE_ERROR = 2
ROOT_SPEAKS_S = 2.0  # seconds that other ranks wait, because rank 0 may report the same error

COMMANDS = {
    "train": ("train", "Train the model that a TOML file describes, on all ranks of the launch."),
    "evaluate": ("evaluate", "Test the model of a run, on all ranks of the launch."),
    "predict": ("evaluate", "Write the model's output for every sample into an HDF5 file."),
    "launch": (
        "launch",
        "Start a command on several ranks, with the mpirun of this installation.",
    ),
    "shim": ("shim", "Run a script that imports Horovod, unchanged, on hpctrain."),
    "submit": ("submit", "Write a batch script for Slurm, check it and submit it."),
    "site": ("site", "List and show profiles of computing centres, or write one."),
    "status": ("status", "Print the state of a run: waiting, running, stopped or finished."),
    "top": ("top", "Watch a running job: steps, loss, speed, slow ranks, time left."),
    "plot": ("results", "Draw runs as a figure: loss, metrics, learning rate, speed, times."),
    "report": ("results", "Write a self-contained HTML page about runs."),
    "compare": ("results", "Compare runs: results, speed, configuration, environment."),
    "runs": ("results", "List the runs in a directory: state, step, loss, metric, ranks, start."),
    "study": ("study", "Measure how a training scales, and report the measurements."),
    "bench": ("bench", "Measure operations, or fit the figures of a machine to measurements."),
    "plan": ("plan", "Predict the fastest setup for a goal, or for a model larger than a GPU."),
    "data": ("data", "Create, inspect, check, repair and change sharded HDF5 data sets."),
    "checkpoint": ("checkpoint", "Inspect, check, compare and export the checkpoints of a run."),
    "horovod": ("horovod", "Build Horovod itself, as an engine that hpctrain can run on."),
    "doctor": ("doctor", "Find faults of this machine, job or launch, and print remedies."),
    "guide": ("guide", "Show a page of the manual, or list its topics."),
    "examples": ("examples", "Write the examples that the manual names into a directory."),
}
"""Module and summary of each command; the summary is the first line of its help."""

EXAMPLES = """
Examples:

  hpctrain train my.toml --init        write a file with every key

  hpctrain train my.toml --dry-run     build everything, train nothing

  hpctrain launch -n 4 hpctrain train my.toml

  hpctrain launch -n 4 --nodes 2 python script.py

  hpctrain launch -n 4 hpctrain shim horovod_script.py

  hpctrain submit my.toml --nodes 2 --tasks 2 --time 30min

  hpctrain top runs/digits

  hpctrain data pack photos/ data/train

  hpctrain doctor

  hpctrain guide start

hpctrain COMMAND --help describes a command, with examples.
"""


class Command(TyperCommand):
    """A command whose module is loaded when the command or its help is requested."""

    def __init__(self, name: str) -> None:
        module, summary = COMMANDS[name]
        super().__init__(name, help=summary)
        self._module = f"hpctrain.cli.{module}"

    def loaded(self) -> Any:
        """Load the module of the command, and return the command that the module defines."""
        with postponed("hpctrain", "hpctrain.cli"):
            its_app = importlib.import_module(self._module).app
        found: Any = typer.main.get_command(its_app)
        found = getattr(found, "commands", {}).get(self.name, found)
        for each in (found, *getattr(found, "commands", {}).values()):
            each.help = _unwrapped(each.help or "")
        return found

    def make_context(self, info_name: Any, args: Any, parent: Any = None, **extra: Any) -> Any:
        """Load the command, and parse its arguments."""
        return self.loaded().make_context(info_name, args, parent, **extra)


def _unwrapped(text: str) -> str:
    """Return help text with the lines of each paragraph joined, because typer keeps breaks.

    Indented text keeps its lines.
    """
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(
        each if "\n " in f"\n{each}" else each.replace("\n", " ") for each in paragraphs
    )


class Commands(TyperGroup):
    """Command group with all commands by name, without loading their modules."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings | {"commands": {name: Command(name) for name in COMMANDS}})


app = typer.Typer(
    cls=Commands,
    add_completion=False,
    pretty_exceptions_enable=False,
    epilog=EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback(invoke_without_command=True)
def hpctrain(
    context: typer.Context, *, version: bool = flag("Print the version and exit.", "--version")
) -> None:
    """Train PyTorch models across the nodes of a supercomputer, under plain mpirun or srun."""
    if version:
        typer.echo(f"hpctrain {__version__}")
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main() -> None:
    """Run the command line.

    An ``HpctrainError`` is printed in one line on stderr. The exit code is 1 for errors in values
    of the training (``NotFiniteError``, ``ReplicaError``), else 2.
    """
    if platform.system() == "Windows":
        sys.stderr.write(
            "hpctrain: hpctrain must run on Linux, but this is Windows; start it "
            "inside WSL: https://learn.microsoft.com/windows/wsl/install\n"
        )
        sys.exit(USAGE_ERROR)
    try:
        app()
    except HpctrainError as error:
        _stop(error)
    except Exception as error:  # errors of the user's script or model
        if _rank()[1]:
            raise  # the exception hook of hpctrain.init() reports the error and its rank
        if str(error).startswith("cannot load MPI library"):  # the message of mpi4py
            _stop(_without_mpi(error))
        _report(error)
        sys.exit(FAILED)


def _without_mpi(error: Exception) -> LaunchError:
    """Return an error about a missing MPI library, with a remedy."""
    try:
        pmi.load()
    except LaunchError as found:
        return found
    return LaunchError(str(error))


def _report(error: Exception) -> None:
    """Print the frames of user code in a traceback; write the whole traceback to the log.

    If no frame belongs to user code, raise ``error`` again.
    """
    world = _world()
    folder = world.current().settings.log_dir if world is not None else None
    log = logs.file_in(folder, 0) if folder else None
    text = user_error.folded(error, log)
    if not text:
        raise error
    if log is not None:
        with suppress(OSError), logs.opened(log) as file:
            file.write("".join(traceback.format_exception(error)))
    sys.stderr.write(f"hpctrain: {text}\n")


def _stop(error: HpctrainError) -> None:
    """Print the error and exit; if only one of several ranks raises it, raise it again.

    If all ranks raise the error, only rank 0 prints it.
    """
    rank, is_joined = _rank()
    code = FAILED if isinstance(error, NotFiniteError | ReplicaError) else USAGE_ERROR
    if is_joined and not isinstance(error, MismatchError | NotFiniteError):
        raise error  # the exception hook of hpctrain.init() adds the rank and ends all ranks
    if rank and not is_joined:
        # Rank 0 usually has the same error, and ends this process when it exits.
        time.sleep(ROOT_SPEAKS_S)
        sys.stderr.write(f"hpctrain: rank {rank}: {error}\n")
    elif not rank:
        sys.stderr.write(f"hpctrain: {error}\n")
    sys.exit(code)


def _rank() -> tuple[int, bool]:
    """Return the rank of this process, and whether this process is connected to other ranks."""
    if (world := _world()) is not None:
        return world.rank(), world.size() > 1
    found = env.launched()
    return (found.rank if found else 0), False


def _world() -> Any:
    """Return the module ``hpctrain.runtime.world`` if hpctrain is initialized, else None.

    Never import the module, because the import takes long.
    """
    module = sys.modules.get("hpctrain.runtime.world")
    return module if module is not None and module.is_initialized() else None
