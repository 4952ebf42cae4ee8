"""``hpctrain launch``: start a command on several ranks."""

import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import typer

from hpctrain.cli import horovodrun
from hpctrain.cli.options import flag, option, takes
from hpctrain.cluster import env
from hpctrain.core import config
from hpctrain.core.errors import LaunchError
from hpctrain.core.paths import absolute
from hpctrain.launch import installed_horovod, mpiexec, mpirun, restart
from hpctrain.launch.stderr import write_line
from hpctrain.train import load_config

COMMAND_FOLLOWS = {"allow_extra_args": True, "allow_interspersed_args": False}
"""Settings of typer for a command whose options are followed by a command of the user."""

INTERRUPTED = 130  # exit code after Ctrl-C, as in a shell

app = typer.Typer()


@dataclass(frozen=True, kw_only=True)
class LaunchOptions:
    """Arguments and options of ``hpctrain launch``."""

    ctx: typer.Context
    num_ranks: int = option(..., "N", "Number of ranks.", "-n", "-np", "--ranks", min=1)
    nodes: int | None = option(
        None, "N", "Divide the ranks of this host into N nodes, for tests.", shown="1", min=1
    )
    hosts: str | None = option(
        None, "a:2,b:2", "Hosts with their ranks.", "--hosts", "-H", shown="this host, or the job"
    )
    hostfile: Path | None = option(
        None, "FILE", "File with a line `host slots=2` for each host.", "--hostfile", "-hostfile"
    )
    network_interface: list[str] | None = option(
        None,
        "eth0",
        "Network interface between the hosts; may be repeated.",
        "--network-interface",
        "--network-interfaces",
        shown="chosen by MPI",
    )
    mpirun: str | None = option(None, "PATH", "Launcher.", shown="the mpirun of this installation")
    timeout: float | None = option(None, "S", "End all ranks after S seconds.", shown="no limit")
    recover: bool = flag(
        "Continue without ranks that die (elastic.run, hpctrain train).", "--recover"
    )
    spares: int = option(
        0, "K", "Start K more ranks that replace ranks that die.", "--spares", min=0
    )
    restart: int = option(0, "N", "Start again up to N times after a failure.", "--restart", min=0)
    log_per_rank: bool = flag("Write a log file per rank instead of per host.", "--log-per-rank")
    tag_output: bool = flag("Prefix each line with its rank.", "--tag-output")
    no_bind: bool = flag("Do not bind ranks to cores; ranks do not bind themselves.", "--no-bind")
    mpi_args: str | None = option(None, "WORDS", "More arguments for mpirun.", "--mpi-args")
    verbose: bool = flag("Print the mpirun command line.", "--verbose")
    dry_run: bool = flag("Print the mpirun command line and start nothing.", "--dry-run")

    def of_mpirun(self, hosts: str | None, variables: dict[str, str]) -> "mpiexec.Options":
        """Return the options for mpirun, which starts the ranks on ``hosts``."""
        is_allocated = bool(env.scheduler())
        watched = {env.WATCHED: "1"} if self.restart else {}
        if self.log_per_rank:
            variables |= {config.variable_of("log_per_rank"): "1"}
        return mpiexec.Options(
            binding="none" if self.no_bind else "auto",
            tag_output=self.tag_output,
            recover=self.recover,
            spares=self.spares,
            allocated=is_allocated,
            interfaces=horovodrun.split(self.network_interface or []),
            variables=mpiexec.rendezvous(hosts, allocated=is_allocated) | variables | watched,
            extra=tuple(shlex.split(self.mpi_args or "")),
        )


@app.command(context_settings=COMMAND_FOLLOWS)
@takes(LaunchOptions, *horovodrun.PARAMETERS)
def launch(options: LaunchOptions, **of_horovodrun: Any) -> None:
    """Start a command on several ranks, with the mpirun of this installation.

    The command follows the options: `python x.py`, `x.py`, `hpctrain ...`, any program.

    The options of `horovodrun` are accepted too. The ranks also get the variables of torchrun
    (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...): a script for torch.distributed runs
    unchanged.

    The death of one rank ends all ranks. With --recover, the other ranks continue from the last
    commit of hpctrain.elastic or the last checkpoint of hpctrain train. The exit code is that of
    the command, except 124 after --timeout and 87 if a rank was killed. The exit code 85 means
    that the run has saved its state and can be continued.

    With --recover --spares K, K additional ranks wait, and replace ranks that die: the number of
    working ranks stays the same. The command must be hpctrain train or use elastic.run.

    With --restart N, a failed command is restarted up to N times, on the hosts of --hosts that can
    still start a program. hpctrain train then continues from its last checkpoint.

    Examples:
      hpctrain launch -n 4 python train.py --epochs 3

      hpctrain launch -n 4 --nodes 2 hpctrain train digits.toml

      hpctrain launch -n 8 --hosts a:4,b:4 train.py

      hpctrain launch -np 8 --hostfile hosts --network-interface eth0 train.py

      hpctrain launch -n 4 --recover --spares 1 hpctrain train digits.toml

      hpctrain launch -n 4 --hosts a:2,b:2 --restart 3 hpctrain train digits.toml

      hpctrain launch -n 4 --dry-run python train.py
    """
    # Raise an error if the current directory was removed, because mpirun does not name this cause.
    absolute("")
    hosts, words = options.hosts, options.ctx.args
    if hosts and options.hostfile:
        raise LaunchError(
            f"hosts must be given once, got --hosts {hosts} and --hostfile {options.hostfile}; "
            "omit one"
        )
    if options.hostfile:
        hosts = mpiexec.read_hostfile(options.hostfile)
    check_configuration(words)
    variables = horovodrun.variables(of_horovodrun)
    started = restart.Launch(
        words=words,
        num_ranks=options.num_ranks,
        mpirun=mpirun.find_mpirun(options.mpirun),
        nodes=options.nodes,
        hosts=hosts,
        options=lambda hosts: options.of_mpirun(hosts, variables),
    )
    line = shlex.join(started.line())
    if note := installed_horovod.without_horovod(words):
        write_line(note)
    if options.dry_run:
        typer.echo(line)
        return
    if options.verbose:
        write_line(line)
    try:
        code = started.run(restarts=options.restart, timeout_s=options.timeout)
    except KeyboardInterrupt:
        code = INTERRUPTED
    explain(code, words, hosts or "")
    raise typer.Exit(code)


def explain(code: int, words: Sequence[str], hosts: str) -> None:
    """Print the reason why a launch has ended, unless the ranks print the reason."""
    reports_itself = ("hpctrain", "train") in pairwise(words)
    if code == env.STOPPED and not reports_itself:
        write_line(
            f"the ranks have stopped with code {code} and saved their state; the same command "
            f"continues"
        )
    for entry in hosts.split(",") if code not in (0, env.STOPPED, INTERRUPTED) and hosts else ():
        host = entry.partition(":")[0]
        try:
            socket.getaddrinfo(host, None)
        except OSError:
            write_line(
                f"every host of --hosts must have an address, but {host} is unknown here; correct "
                f"the name, or define it in /etc/hosts or ~/.ssh/config"
            )


def check_configuration(words: Sequence[str]) -> None:
    """Check the configuration of an ``hpctrain train`` command before the ranks start.

    Raises:
        ConfigError: the file or an override of ``--set`` is invalid.
    """
    rest = list(words[2:])
    if [*words[:2]] != ["hpctrain", "train"] or {"--init", "--explain", "--help", "-h"} & {*rest}:
        return
    overrides, files = [], []
    while rest:
        name, mark, value = rest.pop(0).partition("=")
        if name == "--set":
            overrides.append(value if mark else "".join(rest[:1]))
            del rest[: 0 if mark else 1]
        elif not name.startswith("-"):
            files.append(f"{name}{mark}{value}")
    if len(files) == 1:
        load_config.load(Path(files[0]), overrides, config.given())
