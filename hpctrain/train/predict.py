"""Predictions of a model that is loaded from a checkpoint, written to an HDF5 file."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hpctrain.checkpoint.inspection import checkpoint_of
from hpctrain.comm.agreement import agreed, on_root
from hpctrain.comm.communicator import Communicator
from hpctrain.core.atomic import PART, make_folder, refusal, sync
from hpctrain.core.errors import ConfigError, DataError
from hpctrain.core.paths import absolute
from hpctrain.core.records import read
from hpctrain.core.target import make_importable
from hpctrain.data.loader import Loader
from hpctrain.data.samples import Batch
from hpctrain.parallel.parallel_config import ParallelConfig
from hpctrain.train.load_config import load
from hpctrain.train.refusals import explain_errors, targets
from hpctrain.train.run_directory import RunDirectory
from hpctrain.train.stateful import widened
from hpctrain.train.sync_config import SyncConfig
from hpctrain.train.task import Task, build

OUTPUT = "output"  # name of the HDF5 dataset


def load_task(
    path: Path, comm: Communicator, *, overrides: Sequence[str], which: str, split: str
) -> tuple[Task, Path]:
    """Build the task of a run with the weights of one of its checkpoints. Collective.

    Args:
        path: run directory.
        comm: all ranks.
        overrides: changes of the stored configuration, each ``key=value``.
        which: ``last``, ``best``, or the step of a checkpoint.
        split: samples that ``task.test`` must have: ``test``, ``validation`` or ``train``;
            ``train`` includes the samples that ``data.validation`` holds out.

    Returns:
        The task, and the path of the checkpoint. The model has the averaged weights if the
        checkpoint has them; ``task.test`` yields the samples in their stored order.

    Raises:
        ConfigError: the run has no validation samples; on all ranks.
        MismatchError: there is no such run or checkpoint, or the configuration does not match
            the checkpoint; on all ranks.
    """
    directory = RunDirectory(path)

    def find() -> Path:
        if not directory.config.exists():
            raise ConfigError(f"{path} contains no run; pass a run directory, such as runs/digits")
        directory.check_format()
        return checkpoint_of(path, which)

    checkpoint = on_root(comm, find)
    with agreed(comm):
        config = load(directory.config, overrides).config
        begun = (r["modules"] for r in read(directory.metrics) if "modules" in r)
        make_importable(Path(next(begun, "")).resolve())
        # Inference needs neither a synchronization method nor bitwise reproducible sums.
        config = replace(
            config,
            sync=SyncConfig(),
            parallel=ParallelConfig(),
            model=replace(config.model, init_from=str(absolute(checkpoint)), init_strict=True),
            data=replace(
                config.data,
                stage="",
                on_corrupt="raise",
                validation=0.0 if split == "train" else config.data.validation,
            ),
            train=replace(config.train, reproducible=False, ema=0.0),
        )
    task = build(config, comm)
    if split == "validation" and task.held_out is None:
        raise ConfigError(
            "--split validation must have samples held out, but the run has data.validation = 0 "
            "and data.target returns no validation set; use --split test or train"
        )
    if split == "test" and task.held_out is not None:
        task = replace(task, test=task.held_out)
    if split == "train":
        loader = Loader(
            task.train.dataset,
            order="sequential",
            global_batch=config.train.global_batch,
            comm=comm,
            transform=task.test.transform,
            ragged="padded",
        )
        task = replace(task, test=loader)
    return task, checkpoint


@torch.no_grad()
def predict(task: Task, path: Path, facts: Mapping[str, Any]) -> tuple[int, ...]:
    """Write the output of the model for every sample of ``task.test`` to HDF5. Collective.

    Each rank writes its rows into the dataset ``output`` of one file. The file appears under its
    final name only if it is complete.

    Args:
        task: model and samples.
        path: HDF5 file; must not exist.
        facts: attributes of the file.

    Returns:
        Shape of the dataset: number of samples, then the shape of one output.

    Raises:
        MismatchError: the file exists, or the outputs are not tensors of equal shapes; on all
            ranks.
    """
    comm, loader = task.comm, task.test
    part = path.with_name(path.name + PART)
    on_root(comm, lambda: _check_new(path))
    task.model.eval()
    fault = ""
    rows: _Rows | None = None
    with _published(part, path, comm):
        for batch in loader:
            try:
                values = _output(task, batch) if not fault else None
            except DataError as error:
                fault, values = str(error), None
            if rows is None:  # at least one rank has samples in the first step
                comm.agree(not fault, fault)
                kinds = comm.allgather_object(None if values is None else _kind(values))
                kind = next(each for each in kinds if each is not None)
                rows = _Rows(part, len(loader.dataset), kind, facts, comm)
            if values is not None:
                fault = rows.write(int(loader.samples_at(loader.place)[0]), values)
        assert rows is not None
        comm.agree(not fault, fault)
        rows.close()
    return rows.shape


def _output(task: Task, batch: Batch) -> NDArray[Any] | None:
    """Return the outputs of the model for this rank's samples; None without samples."""
    if not batch.num_samples:
        task.exchange.forward_empty(task.split(batch)[0])
        return None
    with task.precision.autocast():
        inputs, _ = task.split(batch)
        with explain_errors(targets(task.config)[0], inputs):
            output = task.model(inputs)
    output = widened(output)
    if not isinstance(output, Tensor) or output.shape[:1] != (batch.num_samples,):
        what = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
        raise DataError(
            f"predictions must be a tensor with one row per sample, but the model returned "
            f"{what} for {batch.num_samples} samples; change its output after eval()"
        )
    found: NDArray[Any] = output.contiguous().numpy(force=True)
    return found


def _kind(values: NDArray[Any]) -> tuple[tuple[int, ...], str]:
    """Return shape and dtype of one row; both must be the same in all batches."""
    return values.shape[1:], values.dtype.str


class _Rows:
    """Output file with a contiguous HDF5 dataset; each rank writes its rows at byte offsets.

    Each rank has only its own rows in memory, and HDF5 does not need to be built with MPI.
    The constructor is collective: rank 0 creates the file, and all ranks open it.
    """

    def __init__(
        self,
        part: Path,
        num_rows: int,
        kind: tuple[tuple[int, ...], str],
        facts: Mapping[str, Any],
        comm: Communicator,
    ) -> None:
        self._kind, self._comm = kind, comm
        self.shape = (num_rows, *kind[0])

        def make() -> int:
            make_folder(part.absolute().parent)
            how = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            how.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            how.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            with h5py.File(part, "w") as file:
                file.attrs.update(facts)
                made = file.create_dataset(OUTPUT, self.shape, np.dtype(kind[1]), dcpl=how)
                return int(made.id.get_offset())

        self._offset = on_root(comm, make)
        with agreed(comm):
            try:
                self._file = os.open(part, os.O_WRONLY)
            except OSError as error:
                raise ConfigError(
                    f"all ranks must see the part files, but this rank does not see {part}: "
                    f"{error.strerror}"
                ) from None

    def write(self, first: int, values: NDArray[Any]) -> str:
        """Write rows, starting at row ``first``; return an error message, empty on success."""
        if _kind(values) != self._kind:
            return (
                f"all predictions must have the same shape and type, got {_kind(values)} after "
                f"{self._kind}; pad them in the model"
            )
        left = values.data.cast("B")
        place = self._offset + first * (values.nbytes // len(values))
        try:
            while left:
                written = os.pwrite(self._file, left, place)
                left, place = left[written:], place + written
        except OSError as error:
            return f"predictions cannot be written: {refusal(error, 'name another --output')}"
        return ""

    def close(self) -> None:
        """Wait until the rows of all ranks are on disk. Collective."""
        os.fsync(self._file)
        os.close(self._file)
        self._comm.barrier()


def _check_new(path: Path) -> None:
    if path.exists():
        raise ConfigError(f"{path} already exists; choose another name, or delete the file")


@contextmanager
def _published(part: Path, path: Path, comm: Communicator) -> Iterator[None]:
    """Rename ``part`` to ``path`` after the block; remove ``part`` on an error.

    Collective on exit.
    """

    def publish() -> None:
        _check_new(path)
        part.rename(path)
        sync(path.absolute().parent)

    try:
        yield
        on_root(comm, publish)
    finally:
        if comm.rank == 0:
            part.unlink(missing_ok=True)
