"""What a rank takes and tells when it has joined a world."""

import json
from pathlib import Path

import torch

from hpctrain.cluster.env import set_torch_ranks
from hpctrain.cluster.topology import Topology
from hpctrain.comm.factory import Connection
from hpctrain.comm.mpi_library import version
from hpctrain.comm.plan.planning import StoredPlan
from hpctrain.core import config, logs
from hpctrain.core.torch_compat import warn_if_untested


def take_place(found: Connection) -> None:
    """Let torch have the threads of this rank, and the accelerator of its number on its host.

    Where it sees one, as by ``srun --gpus-per-task=1``, or has taken another already, that stays.
    """
    torch.set_num_threads(found.plan.threads)
    count = torch.accelerator.device_count()
    if count > 1 and not torch.accelerator.current_device_index():
        torch.accelerator.set_device_index(found.topology.host_rank % count)


def tell_place(here: Topology) -> None:
    """Let variables of torchrun, where they are set, say what is so in this world.

    Of those that were started together some may wait, or be lost.
    """
    set_torch_ranks(here.rank, here.size, here.host_rank, len(here.host_ranks))


def report(found: Connection) -> None:
    """Log on rank 0 the plan and the warnings of all ranks. Collective."""
    logs.logger.debug("plan by %s: %s", found.plan_origin, found.plan)
    notes = found.comm.gather_object([*config.remarks(engine=found.plan.engine), *found.notes])
    if notes is not None:
        logs.warn_merged(notes)
        warn_if_untested()


def tell_study(folder: Path, found: Connection) -> None:
    """Let a scaling study know how the ranks of this point communicate."""
    mpi = version() if found.topology.size > 1 else None  # one rank loads no MPI
    topology = {"mpi": mpi, "topology": dict(found.topology.describe())}
    facts = {**topology, **StoredPlan.of(found.topology, found.plan).as_dict()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
