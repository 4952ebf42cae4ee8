"""``hpctrain site``: list and show profiles of computing centres, or write one."""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import typer

from hpctrain.cli.options import Partition, aligned, argument
from hpctrain.cluster import resources
from hpctrain.core import keys
from hpctrain.core.atomic import explained_writes
from hpctrain.core.errors import ConfigError, LaunchError
from hpctrain.launch import site as sites
from hpctrain.launch.slurm import scheduler

SYS = Path("/sys")
DEVICES = Path("/dev")

_SCRATCH = ("SCRATCH", "PSCRATCH", "WORK", "LOCAL_DIR")  # variables of scratch directories

_SOUGHT = {
    "job": ("partition", "scratch"),
    "node": ("cpus", "gpus", "numa_domains", "adapters", "network"),
}
"""Keys of a profile that ``init`` tries to find, by table."""

_NETWORKS: Mapping[str, Literal["slingshot", "infiniband"]] = {
    "cxi": "slingshot",
    "infiniband": "infiniband",
}

app = typer.Typer(no_args_is_help=True)


@app.callback()
def site() -> None:
    """List and show profiles of computing centres, or write one.

    A profile is a TOML file with facts that a centre documents: partition, GPUs, the cores next to
    each GPU, modules, and variables for the network. hpctrain submit and doctor use the profile of
    --site, or else slurm/site.toml, or else the profile of a machine that they recognize.

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
    for row in aligned((name, sites.read(name).title) for name in sites.names()):
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
    """Write a profile of this machine: all keys, with the facts that hpctrain finds.

    Start the command on a compute node, which has the GPUs and network adapters.

    Examples:
      srun -N 1 -n 1 hpctrain site init --partition gpu
    """
    if path.exists():
        raise ConfigError(f"{path} must not exist, but exists; delete it, or name another file")
    with explained_writes("a profile", path, "name another file"):
        path.parent.mkdir(parents=True, exist_ok=True)
        version = "".join(f"{key} = {json.dumps(value)}\n" for key, value in sites.STAMP.items())
        profile = _profile(partition)
        path.write_text(version + keys.render(profile), encoding="utf-8")
    values = {
        f"{table}.{name}": getattr(getattr(profile, table), name)
        for table, names in _SOUGHT.items()
        for name in names
    }
    found = [f"{key} = {json.dumps(value)}" for key, value in values.items() if value]
    missing = [key for key, value in values.items() if not value]
    typer.echo(f"{path} is written\nfound: {', '.join(found) or 'nothing'}")
    if missing:
        typer.echo(
            f"not found: {', '.join(missing)}; the command finds these on a compute node of a "
            f"cluster with Slurm, and your site documents them"
        )
    site = "" if path == sites.OWN else f" --site {path}"
    typer.echo(f"next: complete the file; hpctrain submit{site} and hpctrain doctor{site} use it")


def _profile(partition: str | None, environ: Mapping[str, str] = os.environ) -> sites.SiteProfile:
    """Return a site profile with the facts that Slurm and this machine report."""
    cluster, usual = _of_slurm(environ)
    shape = scheduler.node_shape(partition, environ)
    adapters = resources.live_adapters((SYS / "class/infiniband", SYS / "class/cxi"))
    job = sites.SiteJob(
        partition=partition or usual,
        scratch=[f"${name}" for name in _SCRATCH if environ.get(name)],
    )
    node = sites.SiteNode(
        cpus=shape.cores * shape.threads_per_core if shape else 0,
        gpus=len(list(DEVICES.glob("nvidia[0-9]*"))) or len(list(DEVICES.glob("dri/render*"))),
        numa_domains=len(list((SYS / "devices/system/node").glob("node[0-9]*"))),
        adapters=len(adapters),
        network=_NETWORKS.get(min((each.parent.name for each in adapters), default=""), ""),
    )
    title = f"cluster {cluster}" if cluster else "this machine"
    return sites.SiteProfile(name=cluster or "own", title=title, job=job, node=node)


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
