"""``hpctrain launch``: start a command on several ranks."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hpctrain.cli.horovodrun import split, variables, with_options
from hpctrain.cli.options import flag, option
from hpctrain.cluster.env import STOPPED, WATCHED, scheduler
from hpctrain.core.errors import LaunchError
from hpctrain.launch import mpiexec
from hpctrain.launch.installed_horovod import without_horovod
from hpctrain.launch.mpiexec import read_hostfile
from hpctrain.launch.mpirun import find_mpirun
from hpctrain.launch.restart import Launch
from hpctrain.launch.stderr import say

CONTEXT_SETTINGS = {"allow_extra_args": True, "allow_interspersed_args": False}
"""Options end where the command begins: those behind it are the command's own."""

INTERRUPTED = 130  # exit code after Ctrl-C, as a shell has it


@with_options
def launch(  # noqa: PLR0913 - a command's options
    ctx: typer.Context,
    *,
    num_ranks: Annotated[int, option("N", "How many ranks.", "-n", "-np", "--ranks", min=1)],
    nodes: Annotated[int | None, option("N", "Declare so many nodes on this host.", min=1)] = None,
    hosts: Annotated[
        str | None, option("a:2,b:2", "Real hosts with their ranks.", "--hosts", "-H")
    ] = None,
    hostfile: Annotated[
        Path | None,
        option("FILE", "The same, a line `host slots=2` each.", "--hostfile", "-hostfile"),
    ] = None,
    network_interface: Annotated[
        list[str] | None,
        option(
            "eth0",
            "Network between the hosts; MPI chooses.",
            "--network-interface",
            "--network-interfaces",
        ),
    ] = None,
    mpirun: Annotated[str | None, option("PATH", "The launcher to use.")] = None,
    timeout: Annotated[float | None, option("S", "End all ranks after so many seconds.")] = None,
    recover: Annotated[
        bool, flag("Go on without ranks that die (elastic.run, hpctrain train).", "--recover")
    ] = False,
    spares: Annotated[
        int,
        option("K", "So many more ranks wait to replace those that die.", "--spares", min=0),
    ] = 0,
    restart: Annotated[
        int, option("N", "Start again up to N times when it fails.", "--restart", min=0)
    ] = 0,
    tag_output: Annotated[bool, flag("Each line names its rank.", "--tag-output")] = False,
    no_bind: Annotated[bool, flag("Tie no rank to a core.", "--no-bind")] = False,
    mpi_args: Annotated[
        str | None, option("WORDS", "More words for this mpirun.", "--mpi-args")
    ] = None,
    verbose: Annotated[bool, flag("Print the mpirun line.", "--verbose")] = False,
    dry_run: Annotated[
        bool, flag("Print the mpirun line and start nothing.", "--dry-run")
    ] = False,
    **of_horovodrun: Any,
) -> None:
    """Start a command on several ranks with the mpirun that fits this installation.

    Behind the options comes the command: `python x.py`, `x.py`, `hpctrain ...`, any program.

    The options of `horovodrun` are understood too. The ranks also find what torchrun sets (RANK,
    WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, ...), so a script for torch.distributed runs unchanged.

    One rank's death ends all ranks; under --recover those that are left go on from the last
    commit of hpctrain.elastic, or checkpoint of hpctrain train. The exit code is the command's,
    124 after --timeout, 87 after a rank was killed; 85 is a run that has stopped and wants to
    continue.

    Under --recover --spares K so many more ranks wait, and take the place of those that die, in
    elastic.run and hpctrain train: they keep their size.

    Under --restart N a command that fails is started again, up to N times, of --hosts on those
    where a program can still be started; hpctrain train goes on from its last checkpoint.

    Examples:
      hpctrain launch -n 4 python train.py --epochs 3

      hpctrain launch -n 4 --nodes 2 hpctrain train digits.toml

      hpctrain launch -n 8 --hosts a:4,b:4 train.py

      hpctrain launch -np 8 --hostfile hosts --network-interface eth0 train.py

      hpctrain launch -n 4 --recover hpctrain train digits.toml

      hpctrain launch -n 4 --recover --spares 1 hpctrain train digits.toml

      hpctrain launch -n 4 --hosts a:2,b:2 --restart 3 hpctrain train digits.toml

      hpctrain launch -n 4 --dry-run python train.py
    """
    if hosts and hostfile:
        raise LaunchError(
            f"hosts come from one place, got --hosts {hosts} and --hostfile {hostfile}; "
            "leave one out"
        )
    if hostfile:
        hosts = read_hostfile(hostfile)
    check_configuration(ctx.args)
    found = find_mpirun(mpirun)
    allocated = bool(scheduler())

    def options(hosts: str | None) -> mpiexec.Options:
        given = variables(of_horovodrun) | ({WATCHED: "1"} if restart else {})
        return mpiexec.Options(
            binding="none" if no_bind else "auto",
            tag_output=tag_output,
            recover=recover,
            spares=spares,
            allocated=allocated,
            interfaces=split(network_interface or []),
            variables=mpiexec.rendezvous(hosts, allocated=allocated) | given,
            extra=tuple(shlex.split(mpi_args or "")),
        )

    started = Launch(
        words=ctx.args,
        num_ranks=num_ranks,
        mpirun=found,
        nodes=nodes,
        hosts=hosts,
        options=options,
    )
    line = shlex.join(started.line())
    if told := without_horovod(ctx.args):
        say(told)
    if dry_run:
        typer.echo(line)
        return
    if verbose:
        say(line)
    try:
        code = started.run(restarts=restart, timeout_s=timeout)
    except KeyboardInterrupt:
        code = INTERRUPTED
    if code == STOPPED:
        say(
            f"the ranks have stopped with code {STOPPED} and saved their state; the same command "
            f"continues, `hpctrain train` with --resume"
        )
    raise typer.Exit(code)


def check_configuration(words: Sequence[str]) -> None:
    """Read the configuration of an ``hpctrain train`` that is to be started, once for all ranks.

    Raises ``ConfigError``: it, or what replaces its values, is wrong.
    """
    rest = list(words[2:])
    if [*words[:2]] != ["hpctrain", "train"] or {"--init", "--explain", "--help", "-h"} & {*rest}:
        return
    from hpctrain.core.config import given  # noqa: PLC0415
    from hpctrain.train.load_config import load  # noqa: PLC0415

    overrides, files = [], []
    while rest:
        name, mark, value = rest.pop(0).partition("=")
        if name == "--set":
            overrides.append(value if mark else "".join(rest[:1]))
            del rest[: 0 if mark else 1]
        elif not name.startswith("-"):
            files.append(f"{name}{mark}{value}")
    if len(files) == 1:
        load(Path(files[0]), overrides, given())
