"""Steps of a rank after it has joined a world: threads, device, log and records."""

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


def configure_torch(found: Connection) -> None:
    """Set the number of threads and the accelerator of this rank in torch. Local.

    The index of the accelerator is the number of the rank on its host. The current device is kept
    if only one device is visible, as with ``srun --gpus-per-task=1``, or if its index is not 0.
    """
    torch.set_num_threads(found.plan.threads)
    count = torch.accelerator.device_count()
    if count > 1 and not torch.accelerator.current_device_index():
        torch.accelerator.set_device_index(found.topology.host_rank % count)


def update_torchrun_variables(here: Topology) -> None:
    """Set the variables of torchrun to the ranks of this world, if torchrun set these variables.

    The world may be smaller than the launch, because spares wait and ranks may be lost.
    """
    set_torch_ranks(here.rank, here.size, here.host_rank, len(here.host_ranks))


def report(found: Connection) -> None:
    """Log on rank 0 the plan and the warnings of all ranks. Collective."""
    logs.logger.debug("plan by %s: %s", found.plan_origin, found.plan)
    notes = found.comm.gather_object([*config.remarks(engine=found.plan.engine), *found.notes])
    if notes is not None:
        logs.warn_merged(notes)
        warn_if_untested()


def write_plan(folder: Path, found: Connection) -> None:
    """Write ``plan.json`` with the topology and the plan for a scaling study."""
    mpi = version() if found.topology.size > 1 else None  # one rank loads no MPI
    topology = {"mpi": mpi, "topology": dict(found.topology.describe())}
    facts = {**topology, **StoredPlan.of(found.topology, found.plan).as_dict()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
