"""Copy a data set to storage that the ranks of a node share: once per node, not once per rank."""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from hpctrain.cluster import env
from hpctrain.core.atomic import PART, reason_of
from hpctrain.core.errors import DataError, HpctrainError
from hpctrain.core.logs import logger
from hpctrain.core.units import format_bytes
from hpctrain.data.format.crc import combine
from hpctrain.data.io.staging.node_copy import Copied, Copier, CopyShare, damaged, rank_of
from hpctrain.data.io.staging.place import folders, sites
from hpctrain.data.io.staging.staged_shard import StagedOpener
from hpctrain.data.io.staging.staging_directory import StageDirectory, sweep
from hpctrain.data.io.staging.staging_plan import Chosen, ShardPlan, plan_of, wanted_blocks
from hpctrain.data.reader import ShardedDataset
from hpctrain.data.tools.salvage import UNREADABLE

if TYPE_CHECKING:
    from hpctrain.comm.communicator import Communicator


def stage(
    dataset: ShardedDataset,
    node: "Communicator",
    to: Path | str = "auto",
    blocks: ArrayLike | None = None,
) -> ShardedDataset:
    """Copy a data set to a folder of this node, shared by its ranks, and read it from there.

    Collective over the ranks of a node: each copies a part, and all return when all is there.
    Bytes are compared with their checksums on the way. The copy is removed when no rank of the
    node reads it any more, by whatever end; what is left of killed jobs is removed at the start.

    What does not fit, also what a disk that fills up meanwhile does not take, is read from where
    the data set is; one line of the log says so.

    Args:
        dataset: the same on every rank.
        node: the ranks of one node.
        to: a folder, made if missing; by default ``HPCTRAIN_STAGE_DIR``, else the job's folder
            for temporary files if it is on a disk of the node, else the node's memory, at most
            half of what is free.
        blocks: where not all fits, what to copy: ``(num_blocks,)`` numbers of blocks of
            ``dataset.block_size`` samples, such as those of the node's lanes; by default as many
            shards as fit.

    Returns:
        The data set with another way to its files; ``dataset`` itself where nothing was copied.

    Raises:
        CorruptError: a shard of the data set is damaged; on every rank of the node.
        DataError: the folder cannot be used; on every rank of the node.
    """
    task, lease = _chosen_together(dataset, node, to, blocks)
    if task is None:
        return dataset
    copied = Copied()
    try:
        lease = lease or StageDirectory.join(task.directory)
    except OSError as error:
        copied.error = DataError(
            f"cannot use {task.directory}: {reason_of(error)}; every rank of a node must see it"
        )
    else:
        copier = Copier(
            dataset.path, task.directory, dataset.manifest, rank=node.rank, size=node.size
        )
        copied = copier.copy(task.plans)
    try:
        present = _finish(dataset, node, task, node.allgather_object(copied))
    except BaseException:
        if lease is not None:
            lease.close()
        raise
    if lease is None or not present:
        if lease is not None:
            lease.close()
        return dataset
    return dataset.with_opener(StagedOpener(task.directory, present, lease))


@dataclass(frozen=True, slots=True)
class _Task:
    """What the node copies, and where to."""

    directory: Path
    plans: list[ShardPlan]


def _chosen_together(
    dataset: ShardedDataset, node: "Communicator", to: Path | str, blocks: ArrayLike | None
) -> tuple[_Task | None, StageDirectory | None]:
    """Let rank 0 choose; all learn of it. Only rank 0 holds the directory so far."""
    task: _Task | str | None = None
    lease = None
    if node.rank == 0:
        try:
            task, lease = _choose(dataset, to, blocks)
        except (*UNREADABLE, HpctrainError) as error:
            task = f"cannot copy data set {dataset.path} to this node: {reason_of(error)}"
    task = node.broadcast_object(task)
    if isinstance(task, str):
        raise DataError(task)
    return task, lease


def _choose(
    dataset: ShardedDataset, to: Path | str, blocks: ArrayLike | None
) -> tuple[_Task | None, StageDirectory | None]:
    for folder in folders(to):
        for left_over in sweep(folder):
            logger.info("removed %s of a job that was killed", left_over)
    manifest, wanted = dataset.manifest, None
    if blocks is not None:
        length = dataset.block_size
        wanted = wanted_blocks(manifest, np.asarray(blocks, np.int64) * length, length)
    found = sites(to, dataset.path)
    choices = []
    for site in found:
        plans = plan_of(dataset.path, manifest, wanted, site.room_bytes)
        choices.append((sum(plan.num_bytes for plan in plans), site, plans))
    choices.sort(key=lambda choice: -choice[0])  # equal ones stay in their order
    refusals = [f"{site.folder} has room for {format_bytes(site.room_bytes)}" for site in found]
    for num_bytes, site, plans in choices:
        if not num_bytes:
            break
        try:
            lease = StageDirectory.create(site.folder, _label(manifest.uuid))
        except OSError as error:
            refusals.append(f"{site.folder} refuses: {reason_of(error)}")
            continue
        _tell(dataset, plans, num_bytes, lease.path)
        return _Task(lease.path, plans), lease
    _tell_nothing(dataset, refusals, explicit=to != "auto")
    return None, None


def _label(uuid: str) -> str:
    job = env.job_id() or f"pid{os.getpid()}"
    return re.sub(r"[^\w.-]", "_", f"{uuid[:8]}-{job}")


def _tell(
    dataset: ShardedDataset, plans: Sequence[ShardPlan], num_bytes: int, target: Path
) -> None:
    if num_bytes == dataset.manifest.num_bytes:
        logger.info(
            "data set %s is copied to %s: %s", dataset.path, target, format_bytes(num_bytes)
        )
    else:
        logger.warning(
            "%s of the %s of data set %s are copied to %s, from %d of %d shards: there is no room "
            "for more; the rest is read from where it is",
            format_bytes(num_bytes),
            format_bytes(dataset.manifest.num_bytes),
            dataset.path,
            target.parent,
            len(plans),
            len(dataset.manifest.shards),
        )


def _tell_nothing(dataset: ShardedDataset, refusals: Sequence[str], *, explicit: bool) -> None:
    if not refusals and not explicit:
        logger.info(
            "data set %s is read from where it is: no other storage of this node", dataset.path
        )
        return
    logger.warning(
        "data set %s is read from where it is, %s fit nowhere on this node: %s",
        dataset.path,
        format_bytes(dataset.manifest.num_bytes),
        "; ".join(refusals),
    )


def _finish(
    dataset: ShardedDataset, node: "Communicator", task: _Task, copied: Sequence[Copied]
) -> dict[int, Chosen | None]:
    """Give the complete copies their names and return them; or raise on all ranks."""
    for one in copied:
        if one.error is not None:
            raise one.error
    present: dict[int, Chosen | None] = {}
    for plan in task.plans:
        shares = [one.shares.get(plan.index) for one in copied]
        if any(share is None or not share.complete for share in shares):
            continue  # the storage is full
        if plan.blocks is None:
            _check_whole(dataset, plan.index, [share for share in shares if share is not None])
        present[plan.index] = plan.blocks
    refusal = ""
    if node.rank == 0:
        try:
            _publish(dataset, task, present)
        except OSError as error:
            refusal = f"cannot use the copy in {task.directory}: {reason_of(error)}"
        if full := next((one.full for one in copied if one.full), ""):
            logger.warning(
                "%s took %d of %d shards of data set %s and no more: %s; the rest is read from "
                "where it is",
                task.directory.parent,
                len(present),
                len(task.plans),
                dataset.path,
                full,
            )
    if refusal := node.broadcast_object(refusal):  # after it, all copies have their names
        raise DataError(refusal)
    return present


def _check_whole(dataset: ShardedDataset, index: int, shares: Sequence[CopyShare]) -> None:
    """Compare the crc32 of a file with that of its parts."""
    crc32 = 0
    for turn in range(len(shares)):
        mine = shares[rank_of(turn, index, len(shares))]
        crc32 = combine(crc32, mine.crc32, mine.num_bytes)
    if crc32 != dataset.manifest.shards[index].crc32:
        raise damaged(dataset.path, dataset.manifest, index, "it has the wrong crc32")


def _publish(dataset: ShardedDataset, task: _Task, present: Mapping[int, Chosen | None]) -> None:
    for plan in task.plans:
        path = task.directory / dataset.manifest.shards[plan.index].file
        part = path.with_name(path.name + PART)
        if plan.index in present:
            part.rename(path)
        else:
            part.unlink(missing_ok=True)
