"""``hpctrain train``: train the model of a TOML file."""

from dataclasses import dataclass
from pathlib import Path

import typer

from hpctrain.cli.options import Overrides, aligned, argument, flag, option, require_name, takes
from hpctrain.comm import mpi_world
from hpctrain.core import atomic, config, keys
from hpctrain.core.paths import absolute
from hpctrain.runtime import stopping
from hpctrain.train import load_config, run, toy_problem

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Arguments and options of ``hpctrain train``."""

    config: Path | None = argument("CONFIG.toml", "Configuration of the run.", default=None)
    overrides: Overrides = None
    dry_run: bool = flag(
        "Build and print everything, try one step and one test batch, save nothing.", "--dry-run"
    )
    look: bool = flag("", "--look", hidden=True)
    resume: bool = flag("Continue the run in its directory.", "--resume")
    changed: bool = flag(
        "With --resume: accept a changed configuration, such as more epochs.", "--changed"
    )
    force: bool = flag(
        "With --resume: take over the run from the job that is running in its directory. That job "
        "loses its progress since the last checkpoint.",
        "--force",
    )
    verbose: bool = flag("Print the whole configuration, topology and plan.", "--verbose", "-v")
    init: bool = flag("Write CONFIG.toml with every key, and exit.", "--init")
    explain: str | None = option(
        None, "KEY", "Print meaning, value and origin of a key or of a table, and exit."
    )

    def run_options(self) -> "run.RunOptions":
        """Return the options of the run."""
        return run.RunOptions(
            dry_run=self.dry_run or self.look,
            look=self.look,
            resume=self.resume,
            changed=self.changed,
            force=self.force,
            verbose=self.verbose,
        )


@app.command()
@takes(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train the model that a TOML file describes, on all ranks of the launch.

    SIGTERM, SIGUSR1, SIGHUP, Ctrl-C, the end of the time limit, or a file STOP in the run
    directory stops the run after the current step: the run saves its state and exits with code 85.
    A second signal ends the run at once.

    One job at a time writes into a run directory. A second job waits one minute for the first
    job to end, so that a requeued job can start after a kill. After this minute, the second job
    exits, and its error names the first job.

    Values are taken from --set, then HPCTRAIN_* variables, then the file, then the defaults.

    Examples:
      hpctrain train examples/digits.toml

      hpctrain train examples/digits.toml --set train.epochs=5 --set model.args.width=32

      hpctrain train examples/digits.toml --resume

      hpctrain train examples/digits.toml --resume --changed --set train.epochs=40

      hpctrain train examples/digits.toml --explain train.global_batch

      hpctrain launch -n 4 --nodes 2 hpctrain train examples/digits.toml
    """
    # If the current directory was removed, this raises an error; torch would end the process.
    absolute("")
    overrides = options.overrides or ()
    if options.init:
        path = require_name(
            options.config,
            "--init must have the name of the file to write, got none; "
            "use `hpctrain train my.toml --init`",
        )
        atomic.write_new(path, keys.render(toy_problem.config()))
        typer.echo(
            f"{path} has every key and trains a small synthetic problem: hpctrain train {path}; "
            f"then set model.target and data.target to your own functions"
        )
        return
    if options.explain is not None:
        found = load_config.load(options.config, overrides, config.given()).explain(
            options.explain
        )
        typer.echo("\n".join(aligned(found)))
        return
    path = require_name(
        options.config,
        "a run must have a configuration, got none; use hpctrain train CONFIG.toml, and write "
        "a configuration with hpctrain train my.toml --init",
    )
    # Loading torch takes seconds. Errors of the launch are detected before that, and a request to
    # stop that arrives while torch is loaded is not lost.
    with stopping.held_back():
        mpi_world.doubt()
        run_options = options.run_options()
        given = config.given()
        code = run.run(load_config.load(path, overrides, given), given, run_options)
    if code:
        raise typer.Exit(code)
