"""``hpctrain site``: list and show profiles of computing centres, or write one."""

import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import typer

from hpctrain.cli.options import Partition, aligned, argument
from hpctrain.cluster import resources
from hpctrain.core.atomic import explained_writes
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.core.formats import stamp
from hpctrain.launch import site as sites
from hpctrain.launch.slurm import scheduler

SYS = Path("/sys")
DEVICES = Path("/dev")

_SCRATCH = ("SCRATCH", "PSCRATCH", "WORK", "LOCAL_DIR")  # usual names of variables

app = typer.Typer(no_args_is_help=True)


@app.callback()
def site() -> None:
    """List and show profiles of computing centres, or write one.

    A profile is a TOML file with facts that a centre documents: partition, GPUs, the cores next to
    each GPU, modules, and variables for the network. hpctrain submit and doctor use the profile of
    --site, or else slurm/site.toml, or else the profile of the machine.

    Examples:
      hpctrain site list

      hpctrain site show lumi
    """


@app.command(name="list")
def list_profiles() -> None:
    """List the profiles.

    Examples:
      hpctrain site list
    """
    for row in aligned(
        (name, sites.parse(sites.text(name), name).title) for name in sites.names()
    ):
        typer.echo(row)


@app.command()
def show(name: str = argument("NAME", "Name of the profile.")) -> None:
    """Print a profile.

    Examples:
      hpctrain site show lumi > slurm/site.toml
    """
    typer.echo(sites.text(name), nl=False)


@app.command()
def init(
    path: Path = argument(
        "FILE.toml", "File to write.", default=sites.OWN, shown="slurm/site.toml"
    ),
    *,
    partition: Partition = None,
) -> None:
    """Write a profile of this machine with the facts that hpctrain finds.

    Start the command on a compute node, which has the GPUs and network adapters.

    Examples:
      srun -N 1 -n 1 hpctrain site init --partition gpu
    """
    if path.exists():
        raise ConfigError(f"{path} must not exist, but exists; delete it, or name another file")
    with explained_writes("a profile", path, "name another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("\n".join(_lines(partition)) + "\n", encoding="utf-8")
    typer.echo(f"{path}: add the facts of the documentation of your site")


def _lines(partition: str | None, environ: Mapping[str, str] = os.environ) -> Iterator[str]:
    """Yield the lines of a profile; facts that were not found are omitted."""
    cluster, usual = _of_slurm(environ)
    shape = scheduler.node_shape(partition, environ)
    adapters = resources.live_adapters((SYS / "class/infiniband", SYS / "class/cxi"))
    kinds = {each.parent.name for each in adapters}
    gpus = len(list(DEVICES.glob("nvidia[0-9]*"))) or len(list(DEVICES.glob("dri/render*")))
    domains = len(list((SYS / "devices/system/node").glob("node[0-9]*")))
    yield from _items(**stamp(sites.VERSION, sites.READER))
    yield from _items(
        name=cluster or "own", title=f"cluster {cluster}" if cluster else "this machine"
    )
    yield "\n[job]"
    yield from _items(
        partition=partition or usual,
        scratch=[f"${name}" for name in _SCRATCH if environ.get(name)],
    )
    yield "\n[node]"
    yield from _items(
        cpus=shape.cores * shape.threads_per_core if shape else 0,
        gpus=gpus,
        numa_domains=domains,
        adapters=len(adapters),
        network={"cxi": "slingshot", "infiniband": "infiniband"}.get(min(kinds, default=""), ""),
    )


def _items(**values: object) -> Iterator[str]:
    """Yield ``key = value`` for values that are not empty; JSON texts and lists are valid TOML."""
    yield from (f"{key} = {json.dumps(value)}" for key, value in values.items() if value)


def _of_slurm(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the names of the cluster and of its default partition; empty without Slurm."""
    try:
        config = scheduler.run(["scontrol", "show", "config"], environ).stdout
        partitions = scheduler.run(["sinfo", "-h", "-o", "%P"], environ).stdout.split()
    except LaunchError:
        return "", ""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", config, re.MULTILINE)
    usual = next((each[:-1] for each in partitions if each.endswith("*")), "")
    return found[1] if found else "", usual
